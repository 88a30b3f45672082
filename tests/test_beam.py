"""Beam search's decisions: on paper, against exhaustive search, and against a dense form of the same algorithm."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.beam import BeamMove, BeamSearch, Hypothesis
from pagedjax.config import MAX_SAMPLES, BeamSearchParams

E, A, B, C = range(4)  # E ends a sequence wherever end tokens are [E]
NEVER = -99.0  # a log-probability of no consequence

EARLY_STOPPING: tuple[bool | str, ...] = (True, False, "never")

Candidates = list[tuple[int, float]]


def begin(*, eos: tuple[int, ...] = (E,), max_tokens: int = 4, **params: object) -> BeamSearch:
    made = BeamSearchParams(**{"beam_width": 2, "max_tokens": max_tokens, **params})  # type: ignore[arg-type]
    return BeamSearch(made, eos, max_tokens)


def row(**logprobs: float) -> Candidates:
    """Candidates by name, ``row(A=-1, E=-2)``, filled up with unlikely ones, best first."""
    listed = [(token, logprobs.get(name, NEVER - token)) for token, name in enumerate("EABC")]
    return sorted(listed, key=lambda candidate: -candidate[1])


def results(search: BeamSearch) -> list[tuple[list[int], float]]:
    return [(h.token_ids, h.score) for h in search.hypotheses()]


class TestOnPaper:
    def test_moves_are_ranked_over_all_beams(self) -> None:
        search = begin()
        assert search.advance([row(A=-1, B=-1.5, C=-2)]) == [BeamMove(0, A), BeamMove(0, B)]
        # A A: -3, A B: -3.25; B B: -1.75, B A: -3.5
        assert search.advance([row(A=-2, B=-2.25), row(B=-0.25, A=-2)]) == [BeamMove(1, B), BeamMove(0, A)]
        assert search.hypotheses() == []
        # B B A: -2.75, A A C: -3.5, B B C: -3.75
        assert search.advance([row(A=-1, C=-2), row(C=-0.5)]) == [BeamMove(0, A), BeamMove(1, C)]
        # B B A B: -3.75, A A C B: -3.625, each over 4 tokens
        assert search.advance([row(B=-1), row(B=-0.125)]) == []
        assert search.hypotheses() == [
            Hypothesis([A, A, C, B], -3.625, -0.90625, "length"),
            Hypothesis([B, B, A, B], -3.75, -0.9375, "length"),
        ]

    def test_one_token(self) -> None:
        search = begin(max_tokens=1)
        assert search.advance([row(A=-0.5, E=-1.5, B=-2)]) == []
        assert search.hypotheses() == [Hypothesis([A], -0.5, -0.5, "length"), Hypothesis([E], -1.5, -1.5, "stop")]

    def test_end_token_below_the_width_is_dropped(self) -> None:
        search = begin(max_tokens=2)
        assert search.advance([row(A=-1, B=-1.5, E=-1.75)]) == [BeamMove(0, A), BeamMove(0, B)]
        assert search.hypotheses() == []
        assert search.advance([row(A=-8), row(A=-8)]) == []
        assert results(search) == [([A, A], -4.5), ([B, A], -4.75)]  # [E], at -1.75, would have been the best

    def test_ended_beam_makes_room(self) -> None:
        search = begin()
        assert search.advance([row(E=-1, A=-2, B=-3, C=-4)]) == [BeamMove(0, A), BeamMove(0, B)]
        assert search.hypotheses() == [Hypothesis([E], -1, -1, "stop")]

    def test_two_end_tokens(self) -> None:
        search = begin(eos=(E, A), max_tokens=3)
        assert search.num_candidates == 4
        assert search.advance([row(E=-2, A=-1, B=-3, C=-4)]) == []  # full, and -3 beats neither
        assert results(search) == [([A], -1), ([E], -2)]

    def test_better_hypotheses_push_out_worse(self) -> None:
        search = begin(length_penalty=0.0, max_tokens=3)
        search.advance([row(E=-3, A=-1, B=-4)])
        search.advance([row(E=-1, A=-0.5), row(A=-0.5)])
        assert results(search) == [([A, E], -2), ([E], -3)]
        assert search.advance([row(E=-1, A=-1.25), row()]) == []
        assert results(search) == [([A, E], -2), ([A, A, E], -2.5)]

    @pytest.mark.parametrize(
        ("length_penalty", "expected"),
        [
            (0.0, [([E], -1.0), ([A, E], -1.5)]),
            (1.0, [([A, E], -0.75), ([E], -1.0)]),
            (2.0, [([A, E], -0.375), ([E], -1.0)]),
            (-1.0, [([E], -1.0), ([A, E], -3.0)]),
        ],
    )
    def test_length_penalty(self, length_penalty: float, expected: list[tuple[list[int], float]]) -> None:
        search = begin(length_penalty=length_penalty, early_stopping=True)
        search.advance([row(E=-1, A=-1.25, B=-5)])
        assert search.advance([row(E=-0.25, A=-3), row(A=-5)]) == []
        assert results(search) == expected

    @pytest.mark.parametrize(
        ("early_stopping", "length_penalty", "best_running", "goes_on"),
        [
            # Finished: [E] -1 and [A E] -3; at penalty 1 the worse one scores -1.5.
            (True, 1.0, -2.5, False),
            (True, 1.0, -3.5, False),
            (False, 1.0, -2.5, True),  # -2.5 / 2 = -1.25
            (False, 1.0, -3.0, False),  # -3 / 2 = -1.5, no better
            (False, 1.0, -3.5, False),  # -3.5 / 2 = -1.75
            ("never", 1.0, -3.5, True),  # -3.5 / 4 = -0.875
            ("never", 1.0, -6.0, False),  # -6 / 4 = -1.5, no better
            ("never", 0.0, -2.5, True),
            ("never", 0.0, -3.5, False),
            ("never", -1.0, -2.5, True),  # -2.5 * 2 > -3 * 2: a longer one can only be worse
            ("never", -1.0, -3.5, False),  # -3.5 * 2 < -3 * 2
        ],
    )
    def test_early_stopping(
        self, early_stopping: bool | str, length_penalty: float, best_running: float, goes_on: bool
    ) -> None:
        search = begin(early_stopping=early_stopping, length_penalty=length_penalty)
        assert len(search.advance([row(E=-1, A=-2, B=-20)])) == 2
        moves = search.advance([row(E=-1, A=best_running + 2), row()])
        assert len(search.hypotheses()) == 2
        assert (moves != []) is goes_on

    def test_search_that_goes_on_finds_better(self) -> None:
        found = {}
        for early_stopping in EARLY_STOPPING:
            search = begin(early_stopping=early_stopping)
            search.advance([row(E=-1, A=-2, B=-20)])
            if search.advance([row(E=-1, A=-1.5), row()]):
                search.advance([row(A=-0.125), row()])  # A A A: -3.625
                search.advance([row(E=-0.125), row()])  # A A A E: -3.75
            found[early_stopping] = results(search)
        assert found[True] == found[False] == [([E], -1), ([A, E], -1.5)]
        assert found["never"] == [([A, A, A, E], -0.9375), ([E], -1)]

    def test_ignore_eos(self) -> None:
        search = begin(max_tokens=2, ignore_eos=True)
        assert search.num_candidates == 2
        assert search.advance([row(E=-1, A=-2)]) == [BeamMove(0, E), BeamMove(0, A)]
        search.advance([row(E=-1), row(E=-1)])
        assert search.hypotheses() == [Hypothesis([E, E], -2, -1, "length"), Hypothesis([A, E], -3, -1.5, "length")]

    @pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
    def test_width_of_one_is_greedy(self, early_stopping: bool | str) -> None:
        search = begin(beam_width=1, early_stopping=early_stopping)
        assert search.advance([row(A=-1, E=-1.25)]) == [BeamMove(0, A)]
        assert search.advance([row(E=-1, A=-1.25)]) == []
        assert search.hypotheses() == [Hypothesis([A, E], -2, -1, "stop")]

    def test_ties_go_to_the_lower_beam_then_the_lower_token(self) -> None:
        search = begin(max_tokens=3)
        assert search.advance([row(B=-1, A=-1)]) == [BeamMove(0, A), BeamMove(0, B)]
        assert search.advance([row(C=-1), row(A=-1)]) == [BeamMove(0, C), BeamMove(1, A)]
        search.advance([row(C=-1), row(C=-1)])
        assert results(search) == [([A, C, C], -1), ([B, A, C], -1)]

    def test_sums_are_of_float32(self) -> None:
        search = begin(max_tokens=3, length_penalty=0.7)
        for step in range(3):
            search.advance([row(A=-0.1, B=-50)] * min(2, step + 1))
        total = np.float32(-0.1) + np.float32(-0.1) + np.float32(-0.1)
        best = search.hypotheses()[0]
        assert best.cumulative_logprob == float(total) != -0.1 + -0.1 + -0.1
        assert best.score == float(total / np.float32(3**0.7))

    def test_impossible_tokens_are_never_chosen(self) -> None:
        search = begin(max_tokens=2)
        assert search.advance([[(A, -1.0), (B, -np.inf), (E, -np.inf)]]) == [BeamMove(0, A)]
        assert search.advance([[(E, -1.0), (A, -np.inf)]]) == []
        assert results(search) == [([A, E], -1)]

    def test_vocabulary_smaller_than_the_width(self) -> None:
        search = begin(beam_width=4, max_tokens=2)
        assert search.advance([[(A, -0.5), (E, -1.0)]]) == [BeamMove(0, A)]
        assert search.advance([[(A, -0.5), (E, -1.0)]]) == []
        assert results(search) == [([A, A], -0.5), ([A, E], -0.75), ([E], -1)]

    def test_nothing_is_left_to_run(self) -> None:
        search = begin()
        assert search.advance([[(E, 0.0)]]) == []
        assert results(search) == [([E], 0)]


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("beam_width", 0),
            ("beam_width", MAX_SAMPLES + 1),
            ("beam_width", True),
            ("max_tokens", 0),
            ("length_penalty", float("nan")),
            ("length_penalty", -4.5),
            ("length_penalty", "1"),
            ("early_stopping", "always"),
            ("early_stopping", 1),
            ("early_stopping", None),
            ("ignore_eos", 0),
        ],
    )
    def test_params(self, name: str, value: object) -> None:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})  # type: ignore[arg-type]

    def test_max_tokens(self) -> None:
        with pytest.raises(ValueError, match=r"^max_tokens must be at least 1, got 0"):
            BeamSearch(BeamSearchParams(beam_width=2, max_tokens=4), [E], 0)

    def test_candidates_of_other_beams(self) -> None:
        search = begin()
        with pytest.raises(ValueError, match=r"^candidates must be of 1 running beams, got 2"):
            search.advance([row(), row()])
        search.advance([row(A=-1, B=-2)])
        with pytest.raises(ValueError, match=r"^candidates must be of 2 running beams, got 1"):
            search.advance([row()])


@dataclass(frozen=True)
class Problem:
    """A search over a Markov chain: ``table[last token]`` are log-probabilities, the last row the prompt's."""

    table: np.ndarray  # [vocab + 1, vocab] float32
    params: BeamSearchParams
    eos: tuple[int, ...]

    @property
    def vocab(self) -> int:
        return self.table.shape[1]

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    def total(self, token_ids: list[int]) -> float:
        return float(sum(self.table[last, token] for last, token in itertools.pairwise([-1, *token_ids])))

    def score(self, token_ids: list[int]) -> float:
        return self.total(token_ids) / len(token_ids) ** self.params.length_penalty


@st.composite
def problems(draw: st.DrawFn, vocab: tuple[int, int] = (2, 24), max_tokens: int = 8, fill: bool = False) -> Problem:
    """Problems, with ``fill`` only of vocabularies that always offer enough tokens for Hugging Face's dense form."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(*vocab))
    logits = random.normal(scale=draw(st.sampled_from([0.3, 1.0, 3.0])), size=(size + 1, size))
    table = (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype(np.float32)
    eos = tuple(range(draw(st.integers(0, min(2, size - 1)))))
    widest = size // max(2, 1 + len(eos)) if fill else 6
    params = BeamSearchParams(
        beam_width=draw(st.integers(1, max(1, widest))),
        max_tokens=draw(st.integers(1, max_tokens)),
        length_penalty=draw(st.sampled_from([-1.0, -0.5, 0.0, 0.6, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from(EARLY_STOPPING)),
    )
    return Problem(table, params, eos)


def solve(problem: Problem, num_candidates: int | None = None) -> list[Hypothesis]:
    """Run the search to its end, each move checked on the way."""
    params = problem.params
    search = BeamSearch(params, problem.eos, problem.max_tokens)
    last_tokens = [-1]
    for _ in range(problem.max_tokens):
        candidates = []
        for last in last_tokens:
            best = np.argsort(-problem.table[last], kind="stable")[: num_candidates or search.num_candidates]
            candidates.append([(int(token), float(problem.table[last, token])) for token in best])
        moves = search.advance(candidates)
        assert len(moves) <= params.beam_width
        assert len(set(moves)) == len(moves)
        assert all(0 <= move.parent < len(last_tokens) and move.token_id not in problem.eos for move in moves)
        if not moves:
            return search.hypotheses()
        last_tokens = [move.token_id for move in moves]
    raise AssertionError(f"the search went on past {problem.max_tokens} tokens")


def dense(problem: Problem) -> tuple[list[list[int]], list[float]]:
    """The same search over whole arrays, ranked as Hugging Face documents it: -1e9 stands for what does not count."""
    params, width, vocab, none = problem.params, problem.params.beam_width, problem.vocab, np.float32(-1e9)
    keep = max(2, 1 + len(problem.eos)) * width
    tokens = np.zeros((width, 0), int)
    totals = np.array([0, *[none] * (width - 1)], np.float32)
    done: list[tuple[float, list[int]]] = []
    for length in range(1, problem.max_tokens + 1):
        rows = problem.table[tokens[:, -1]] if length > 1 else problem.table[[-1] * width]
        flat = (rows + totals[:, None]).reshape(-1)
        best = np.argsort(-flat, kind="stable")[:keep]
        longer = np.concatenate([tokens[best // vocab], (best % vocab)[:, None]], axis=1)
        ends = np.isin(best % vocab, problem.eos) | (length == problem.max_tokens)
        scores = flat[best] / np.float32(length**params.length_penalty)
        done += [(float(scores[i]), longer[i].tolist()) for i in range(width) if ends[i]]
        done = sorted(done, key=lambda hypothesis: -hypothesis[0])[:width]
        running = np.where(ends, none, flat[best])
        order = np.argsort(-running, kind="stable")[:width]
        tokens, totals = longer[order], running[order]
        horizon = problem.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        possible = totals[0] / np.float32(horizon**params.length_penalty)
        if len(done) == width and (params.early_stopping is True or possible <= done[-1][0]):
            break
    return [sequence for _, sequence in done], [score for score, _ in done]


class TestAnyChain:
    @given(problems())
    def test_hypotheses(self, problem: Problem) -> None:
        params, found = problem.params, solve(problem)
        assert 1 <= len(found) <= params.beam_width
        if problem.vocab >= params.beam_width + len(problem.eos):
            assert len(found) == params.beam_width
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
        assert len({tuple(h.token_ids) for h in found}) == len(found)
        for h in found:
            assert 1 <= len(h.token_ids) <= problem.max_tokens
            assert not set(h.token_ids[:-1]) & set(problem.eos)
            assert h.finish_reason == ("stop" if h.token_ids[-1] in problem.eos else "length")
            assert h.finish_reason == "stop" or len(h.token_ids) == problem.max_tokens
            assert h.cumulative_logprob == pytest.approx(problem.total(h.token_ids), abs=1e-4)
            assert h.score == pytest.approx(problem.score(h.token_ids), rel=1e-5)

    @given(problems(vocab=(2, 4), max_tokens=3))
    def test_wide_enough_it_is_exhaustive_search(self, problem: Problem) -> None:
        most = problem.max_tokens
        everything = [
            list(sequence)
            for length in range(1, most + 1)
            for sequence in itertools.product(range(problem.vocab), repeat=length)
            if not set(sequence[:-1]) & set(problem.eos) and (length == most or sequence[-1] in problem.eos)
        ]
        found = solve(replace(problem, params=replace(problem.params, beam_width=len(everything))))
        assert sorted(h.token_ids for h in found) == sorted(everything)
        assert problem.score(found[0].token_ids) == pytest.approx(max(map(problem.score, everything)), rel=1e-5)

    @given(problems(vocab=(6, 40), fill=True))
    def test_equals_the_dense_form(self, problem: Problem) -> None:
        if problem.params.beam_width == 1:  # greedy here, whatever early_stopping says
            problem = replace(problem, params=replace(problem.params, early_stopping=True))
        found = solve(problem)
        sequences, scores = dense(problem)
        assert [h.token_ids for h in found] == sequences
        assert [h.score for h in found] == scores

    @given(problems())
    def test_more_candidates_change_nothing(self, problem: Problem) -> None:
        assert solve(problem, num_candidates=problem.vocab) == solve(problem)

    @given(problems())
    def test_width_of_one_is_greedy(self, problem: Problem) -> None:
        [found] = solve(replace(problem, params=replace(problem.params, beam_width=1)))
        greedy = [int(problem.table[-1].argmax())]
        while greedy[-1] not in problem.eos and len(greedy) < problem.max_tokens:
            greedy.append(int(problem.table[greedy[-1]].argmax()))
        assert found.token_ids == greedy
