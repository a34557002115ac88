"""Forty questions about two finished runs, whose right answers are fields of the runs' reports.

    python benchmarks/questions.py --llm openai:MODEL [--base-url URL] [--parallel N] [--json FILE]
    python benchmarks/questions.py --records FILE

Each question is put as `profiling-agent ask` puts it. A number is right if the first sentence of the answer has it, rounded to two digits at least; a
name if all its words are there; yes or no as the first word. `--records` scores the answers of an earlier `--json` FILE again. The floor is what a search
for the question's words finds without a language model: the field whose path shares most words with the question.
"""

import argparse
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from checks import Check, finish, parser_of, rows_in, stamped

from profiling_agent.graph.ask import AskContext, answer_question
from profiling_agent.lib.io import read_json
from profiling_agent.llm.numbers import numbers_in

RUNS = Path(__file__).parent / "results" / "asked"
LEAST_RIGHT = 38
# A number with one digit, such as 5 for 4.85, is no answer.
MAX_ERROR = 0.025
WORD = re.compile(r"[^\W_]+")
AFFIRMATION = {True: "yes", False: "no"}


class Question(NamedTuple):
    """A question about one of RUNS, and the dotted path in `report.json` of its answer."""

    run: str
    text: str
    field: str


MET = (
    ("What is the verdict?", "verdict.outcome"),
    ("Is the result certified at 95% confidence?", "verdict.certified"),
    ("What top-1 did the original model have on the held-out images?", "baseline.top1"),
    ("And what top-1 does the returned model have there?", "best.top1"),
    ("How many points of top-1 does the returned model lose on the held-out images?", "heldout.drop.drop"),
    ("How many points of top-1 are lost at the upper end of the 95% interval?", "heldout.drop.high"),
    ("How many times as fast as the baseline is the returned model?", "verdict.terms.1.measured"),
    ("Welchen Anteil der Bytes hat das zurückgegebene Modell noch?", "verdict.terms.2.measured"),
    ("How large is the returned model on disk, in MB?", "best.size_bytes"),
    ("How many parameters are left?", "best.params"),
    ("Which runtime executes the returned model?", "best.deployment.runtime"),
    ("How many held-out images were right before and are wrong now?", "heldout.drop.num_lost"),
    ("What KL divergence was predicted for attempt 1?", "attempts.0.dry_run.kl"),
    ("What was the KL of attempt 1 before it was compensated?", "attempts.0.calibration_kl_uncompensated"),
    ("Who proposed the plan that was measured?", "attempts.0.origin.by"),
    (
        "How fast was dynamic int8 of ONNX Runtime on the unpruned model?",
        "deployment_search.options.2.race_result.speedup",
    ),
    ("What became of static_nncf in OpenVINO: accepted, uncertain or rejected?", "deployment_search.options.1.status"),
    ("How many requests were sent to the language model?", "spent.requests"),
    ("How many channels does the MLP of block 0 keep?", "attempts.0.dry_run.cuts.0.keep"),
    ("What would it cost, in nats, to keep three of the four heads of block 0?", "sensitivity.0.options.0.kl"),
)
MISSED = (
    ("Which verdict did the run end with?", "verdict.outcome"),
    ("Which limit kept the contract from being met?", "verdict.binding"),
    ("What share of the bytes did I allow?", "goal.max_size_ratio"),
    ("What share of the bytes does the returned model have?", "verdict.terms.2.measured"),
    ("With which size limit would the contract have been met?", "advice.0.changes.max_size_ratio"),
    ("How many times as fast as the baseline is the returned model?", "verdict.terms.1.measured"),
    ("By how many points did top-1 change on the held-out images?", "heldout.drop.drop"),
    ("On how many held-out images was the returned model tested?", "best.num_images"),
    ("Is the returned model pruned, quantized or both?", "best.variant"),
    ("Was attempt 1 accepted?", "attempts.0.accepted"),
    ("How many points of top-1 did attempt 1 lose on the search images?", "attempts.0.deployed.drop.drop"),
    ("What KL divergence was measured of attempt 1?", "attempts.0.calibration_kl"),
    (
        "Wie schnell war das unbeschnittene Modell in OpenVINO bfloat16?",
        "deployment_search.options.4.race_result.speedup",
    ),
    ("How fast was float16 in eager torch?", "deployment_search.options.6.race_result.speedup"),
    ("How long did a batch take the original model, in ms?", "baseline.latency_ms"),
    ("What is the peak memory of a process with the returned model, in MB?", "best.peak_memory_bytes"),
    ("Which processor was it measured on?", "environment.cpu"),
    ("Which kind of job took most of the time?", "times.0.kind"),
    ("返回的模型有多少参数?", "best.params"),
    ("What does cutting the first convolution of stage 3, layer 0 to 80 channels cost?", "sensitivity.14.options.2.kl"),
)
QUESTIONS = (*(Question("met", *each) for each in MET), *(Question("missed", *each) for each in MISSED))


def field_of(report: Any, path: str) -> Any:
    """Return the value at a dotted path."""
    for step in path.split("."):
        report = report[int(step) if isinstance(report, list) else step]
    return report


def words(text: str) -> list[str]:
    """Return the words of a text or of a field's path, in lower case."""
    return WORD.findall(text.casefold())


def is_right(answer: str, field: str, value: Any) -> bool:
    """Return whether the first sentence of an answer has the value of a field, in its unit or one that people use for it."""
    sentence = re.split(r"(?<=[.!?])\s", answer.strip(), maxsplit=1)[0]
    if isinstance(value, bool):
        return words(sentence)[:1] == [AFFIRMATION[value]]
    if isinstance(value, int | float):
        # Thousands, millions and MB; points and percent, but not of nats.
        scales = (1.0, 1e-3, 1e-6) if value >= 1000 else (1.0,) if "kl" in field.rpartition(".")[2] else (1.0, 100.0)
        return any(
            abs(number - abs(value) * scale) <= min(0.5005 * unit, MAX_ERROR * abs(value) * scale)
            for _, number, unit in numbers_in(sentence)
            for scale in scales
        )
    return set(words(str(value))) <= set(words(sentence))


def fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field of a report that is a number, a name, yes or no, with its path."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from fields(part, f"{path}.{name}" if path else str(name))
    elif value is not None:
        yield path, AFFIRMATION[value] if isinstance(value, bool) else value


def floor(report: Any, text: str) -> str:
    """Return the field whose path shares most words with a question, of several the one with the shortest path."""
    requested = set(words(text))
    _, value = max(fields(report), key=lambda leaf: (len(requested & {*words(leaf[0])}), -len(leaf[0])))
    return str(value)


def row_of(question: Question, answer: str, seconds: float) -> dict[str, Any]:
    """Return a question's row: the right answer, the one given, and whether this and that of the floor are right."""
    report = read_json(RUNS / question.run / "report.json")
    value = field_of(report, question.field)
    row = {"run": question.run, "question": question.text, "field": question.field, "value": value, "answer": answer}
    return row | {
        "right": is_right(answer, question.field, value),
        "floor_right": is_right(floor(report, question.text), question.field, value),
        "seconds": seconds,
    }


def answered(question: Question, llm: str, base_url: str | None) -> dict[str, Any]:
    """Put a question to an LLM, and return its row."""
    started = time.perf_counter()
    context = AskContext(run=str(RUNS / question.run), llm=llm, base_url=base_url)
    answer, _ = answer_question(context, question.text, lambda *_: False)
    row = stamped(row_of(question, answer, time.perf_counter() - started) | {"llm": llm})
    print(f"{'right' if row['right'] else 'WRONG'}  {question.text}\n       {row['value']} | {answer}", flush=True)
    return row


def main() -> int:
    """Get answers or read them, score them, and return 1 if too few are right."""
    parser: argparse.ArgumentParser = parser_of(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--llm", metavar="openai:MODEL")
    source.add_argument("--records", type=Path, metavar="FILE", help="FILE of an earlier --json")
    parser.add_argument("--base-url", metavar="URL", help="address of the server")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="questions at a time")
    given = parser.parse_args()
    if given.records:
        earlier = {(row["run"], row["question"]): row for row in rows_in(given.records)}
        pairs = [(question, earlier[question.run, question.text]) for question in QUESTIONS]
        rows = [row | row_of(question, row["answer"], row["seconds"]) for question, row in pairs]
    else:
        with ThreadPoolExecutor(given.parallel) as pool:
            rows = list(pool.map(lambda question: answered(question, given.llm, given.base_url), QUESTIONS))
    num_right, num_floor = (sum(row[name] for row in rows) for name in ("right", "floor_right"))
    print(f"\n{num_right} of {len(rows)} right; without a language model {num_floor}")
    return finish([Check.at_least("right answers", num_right, LEAST_RIGHT)], rows, given.json)


if __name__ == "__main__":
    raise SystemExit(main())
