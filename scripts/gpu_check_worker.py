"""The process that `gpu_check` runs cases in: it may crash or hang, and another goes on where it ended.

It reads its orders as JSON on standard input and reports each event as a line of JSON on standard output:
``no-gpu``; ``device``; ``plan``, a section and its cases; ``built``; ``start``, a case; ``result``; ``lost``, after
which the device is of no use to this process; ``end``.
"""

import gc
import importlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from gpu_check_cases import Case, Result, Run, Setup

Report = Callable[..., None]

LEAST_CAPABILITY = 8.0  # bfloat16 on tensor cores


def run(orders: dict[str, Any], report: Report) -> None:
    """Work through all sections, or until the time is up.

    Args:
        orders: ``sections``, each with the ``seconds`` it may take and the cases that are ``done``; ``memory`` in
            bytes; ``interpret``; ``threads`` that compile, 1 to do a case at a time.
        report: gets every event.
    """
    setup = device(orders, report)
    if setup is None:
        return
    for order in orders["sections"]:
        deadline = time.monotonic() + order["seconds"]
        try:
            cases: Sequence[Case] = importlib.import_module(f"gpu_check_{order['name']}").cases(setup)
        except Exception as error:  # noqa: BLE001  # recorded: the other sections go on
            report("plan", section=order["name"], cases=["import"])
            report("result", section=order["name"], case="import", result=failure(error))
            continue
        report("plan", section=order["name"], cases=[case.name for case in cases])
        left = [case for case in cases if case.name not in order["done"]]
        if not work(order["name"], left, orders["threads"], deadline, report):
            report("lost")
            return
        setup.pools.drop()
        jax.clear_caches()
    report("end")


def device(orders: dict[str, Any], report: Report) -> Setup | None:
    """Say what device there is; None if it is none to work on."""
    try:
        first = jax.devices()[0]
    except RuntimeError as error:
        report("no-gpu", message=f"no NVIDIA GPU: {str(error).splitlines()[0]}")
        return None
    facts = {"device": first.device_kind, "jax": jax.__version__, "interpret": orders["interpret"]}
    memory = orders["memory"]
    if orders["interpret"]:
        report("device", facts=facts | {"arch": "sm_90", "memory": memory})
        return Setup("sm_90", memory, interpret=True)
    capability = str(getattr(first, "compute_capability", ""))
    if first.platform != "gpu" or not re.fullmatch(r"\d+\.\d+", capability):
        plugin = f"pip install 'jax[cuda13]=={jax.__version__}' or 'jax[cuda12]=={jax.__version__}'"
        report("no-gpu", message=f"no NVIDIA GPU: jax sees {first.device_kind} only; where there is one: {plugin}")
        return None
    if float(capability) < LEAST_CAPABILITY:
        report("no-gpu", message=f"no NVIDIA GPU of compute capability {LEAST_CAPABILITY} or more: {capability}")
        return None
    there = (first.memory_stats() or {}).get("bytes_limit", memory)
    arch = "sm_80" if float(capability) < 9 else "sm_90"
    report("device", facts=facts | {"capability": capability, "arch": arch, "memory": min(memory, there)})
    return Setup(arch, min(memory, there))


def work(section: str, cases: Sequence[Case], threads: int, deadline: float, report: Report) -> bool:
    """Build cases in parallel, some at a time, then run these one after the other. False if the device is lost."""
    size = 1 if threads == 1 else 2 * threads
    with ThreadPoolExecutor(threads) as pool:
        for at in range(0, len(cases), size):
            batch = cases[at : at + size]
            if threads == 1 and time.monotonic() < deadline:
                report("start", section=section, case=batch[0].name)  # so that a crash while compiling is known for its
            built = [pool.submit(build, case, deadline) for case in batch]
            for future in built:
                future.add_done_callback(lambda _: report("built", section=section))
            for future in built:
                future.exception()  # waits for all, so that nothing compiles while another's time is taken
            for case, future in zip(batch, built, strict=True):
                if time.monotonic() >= deadline:
                    return True
                report("start", section=section, case=case.name)
                result = outcome(case, future)
                report("result", section=section, case=case.name, result=result)
                if result["status"] == "failed" and not is_alive():
                    return False
            gc.collect()
    return True


def build(case: Case, deadline: float) -> Run:
    """Build a case, unless it is too late."""
    if time.monotonic() >= deadline:
        raise TimeoutError("there was no time to compile it")
    return case.build()


def outcome(case: Case, built: Future[Run]) -> Result:
    """Run a case; what goes wrong is its result."""
    try:
        result = {"status": "ok"} | built.result()()
    except Exception as error:  # noqa: BLE001  # recorded
        result = failure(error)
    return result | ({"trial": True} if case.is_trial else {})


def failure(error: BaseException) -> Result:
    """The result of a case that raised; the whole story goes to the log."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines() or [""]
    return {"status": "failed", "message": f"{type(error).__name__}: {lines[0][:300]}"}


def is_alive() -> bool:
    """Whether the device still computes: an illegal access is the end of all work of the process on it."""
    try:
        return float(jnp.ones(8).sum()) == 8.0
    except Exception:  # noqa: BLE001  # that it fails is the answer
        return False


def main() -> None:
    """Take orders; whatever else is printed goes to the log."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lock = threading.Lock()

    def report(event: str, **fields: Any) -> None:
        with lock:
            print(json.dumps({"event": event, **fields}), file=replies, flush=True)

    run(json.loads(sys.stdin.read()), report)


if __name__ == "__main__":
    main()
