"""pagedjax over HTTP: an aiohttp server that speaks OpenAI's API."""

from server.app import app_runner, create_app, serve
from server.config import ServerConfig

__all__ = ["ServerConfig", "app_runner", "create_app", "serve"]
