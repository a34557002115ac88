"""Commands on models and this machine: `race`, `measure`, `compare`, `pick`, `export`, `push`, `doctor`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from profiling_agent.cli.terminal import (
    JsonOption,
    RunArgument,
    console,
    errors,
    exit_on_errors,
    open_display,
    print_result,
    run_folder,
)
from profiling_agent.errors import RequestError
from profiling_agent.request import SYNONYMS, Request, current_names
from profiling_agent.schemas import NUM_SESSIONS, RuntimeName


def _parse_device(name: str) -> str:
    name = SYNONYMS["device"].get(name, name)
    if name not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name[:80]!r} is no device: use cpu or cuda")
    return name


DeviceOption = Annotated[str, typer.Option(parser=_parse_device, metavar="cpu|cuda", help="where to measure")]


def race(
    sources: Annotated[
        list[Path],
        typer.Argument(parser=run_folder, metavar="RUN_OR_FOLDER...", help="a run (its models), or saved models"),
    ],
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="images in a forward pass")] = 32,
    num_sessions: Annotated[
        int, typer.Option(min=2, max=100, help="times that all start anew; fewer are quicker and prove less")
    ] = NUM_SESSIONS,
    device: DeviceOption = "cpu",
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Race saved models on this machine: samples are interleaved, a process each; speed-ups are over the first.

    What was the fastest on one CPU need not be on another: race a run's models again where you deploy them.

    `profiling-agent race runs/my-run --batch-size 1`
    """
    from profiling_agent.cli.tables import race_table
    from profiling_agent.measure.throughput import race_saved
    from profiling_agent.reporting.results import models_of_all

    with exit_on_errors(), open_display(errors) as display:
        names, result = race_saved(
            models_of_all(sources),
            batch_size=batch_size,
            num_sessions=num_sessions,
            device=device,
            progress=display.stage("race"),
        )
    print_result(result.model_dump(mode="json"), race_table(names, result), is_json=json_)


def measure(
    sources: Annotated[
        list[Path],
        typer.Argument(
            parser=run_folder, metavar="RUN_OR_FOLDER...", help="a run (its baseline and best), or saved models"
        ),
    ],
    device: DeviceOption = "cpu",
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Measure what saved models take: images per second at batch sizes 1, 8 and 32, peak memory, bytes on disk.

    `profiling-agent measure runs/my-run --json > now.json`
    """
    from profiling_agent.cli.tables import measurement_table
    from profiling_agent.measure.throughput import measure_saved
    from profiling_agent.reporting.results import before_and_after

    with exit_on_errors(), open_display(errors) as display:
        models = [model for source in sources for model in before_and_after(source)]
        measurements = measure_saved(models, device=device, progress=display.stage("measure"))
    print_result(measurements.model_dump(mode="json"), measurement_table(measurements), is_json=json_)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(parser=run_folder, metavar="RUN...", help="finished runs, or forks of one"),
    ],
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Show finished runs side by side: contract, verdict, accuracy, speed, size, plans.

    `profiling-agent compare runs/mild runs/bold`
    """
    from profiling_agent.cli.tables import compare_table
    from profiling_agent.reporting.results import read_report

    with exit_on_errors():
        reports = {str(run): read_report(run) for run in runs}
    document = {name: report.model_dump(mode="json") for name, report in reports.items()}
    print_result(document, compare_table(reports), is_json=json_)


SourceArgument = Annotated[
    Path,
    typer.Argument(parser=run_folder, metavar="RUN_OR_FOLDER", help="run (its best model), or a saved model"),
]


def _print_line(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def pick(
    run: RunArgument,
    candidate: Annotated[
        str | None, typer.Option(metavar="NUMBER|NAME", help="one of the list, or `openvino static`")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder to write; nothing is overwritten, the run stays as it is")
    ] = None,
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Take another model of a finished run than the one it returned; nothing is measured again.

    Without `--candidate` all that the run measured is listed: on search images, and whether anything beats it. With it the model
    is copied to `--output`, to be loaded, exported or pushed. Only what the run returned was judged on held-out images; of every
    other this says so.

    `profiling-agent pick runs/my-run --candidate 2 --output small`
    """
    from profiling_agent.cli.tables import candidates_table, picked_table
    from profiling_agent.exporting.pick import candidates
    from profiling_agent.exporting.pick import pick as take

    with exit_on_errors():
        if candidate is None and output is None:
            measured = candidates(run)
            document = [row.model_dump(mode="json") for row in measured]
            print_result(document, candidates_table(measured), is_json=json_)
            return
        if output is None:
            raise typer.BadParameter("name a folder to write it to: --output small")
        if candidate is None:
            raise typer.BadParameter("name a candidate of the list: --candidate 2")
        picked = take(run, output, candidate=candidate)
    print_result(picked.model_dump(mode="json"), picked_table(picked), is_json=json_)
    if not json_:
        _print_line(f"wrote {output}")


def export(
    source: SourceArgument,
    output: Annotated[Path, typer.Option(help="folder to write; nothing is overwritten")],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="onnx|openvino|hf",
            help="onnx: for ONNX Runtime; openvino: for OpenVINO; hf: for from_pretrained; default: as the model is",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="onnx, of a model of torch: fix the batch; else any batch will do")
    ] = None,
) -> None:
    """Write a model for machines without profiling-agent, after checking that it computes the same there.

    The folder has the model, the labels, the images' preparation, and `run.py`, ten lines that print the class of an image.
    `onnx` takes models for ONNX Runtime and float32 models of torch; `openvino` takes models for OpenVINO; `hf` takes models of
    torch without int8 layers. A pruned model is a Hugging Face model only if its layers were cut alike.

    `profiling-agent export runs/my-run --output home`, then `python home/run.py image.png`
    """
    from profiling_agent.exporting.export import export as write

    with exit_on_errors():
        line = write(source, format_, output, batch_size=batch_size)
    _print_line(line)


def push(
    source: Annotated[
        Path,
        typer.Argument(
            parser=run_folder,
            metavar="RUN_OR_FOLDER",
            help="run (its best model), a saved or picked model, or a folder that `export` wrote",
        ),
    ],
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="owner/name on the Hub; it is made where it isn't there")
    ],
    *,
    private: Annotated[bool, typer.Option("--private", help="seen by its owner alone, where it is made now")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="replace what was pushed there before; earlier commits stay")
    ] = False,
) -> None:
    """Put a model and its card on the Hugging Face Hub, and nothing else of the run: no logs, no reports, no paths.

    The token is that of `hf auth login`, or HF_TOKEN; it is never written down. A repository that holds something is named and
    left alone, unless it was pushed from here and `--update` is given.

    `profiling-agent push runs/my-run my-name/small-resnet --private`
    """
    from profiling_agent.exporting.push import push as put

    with exit_on_errors():
        pushed = put(source, repo_id, private=private, update=update)
    _print_line(f"{pushed.url} holds {', '.join(pushed.files)} (commit {pushed.commit[:12]})")


def look_at_model(model: str, *, revision: str | None, runtimes: str, json_: bool) -> None:
    """Cut a model, deploy the result in every way and show what worked; exit with 1 if no deployment did."""
    from profiling_agent.cli.tables import model_tables
    from profiling_agent.jobs.runner import ModelCheck

    with exit_on_errors():
        request = Request.model_validate({"model": model, "revision": revision, "runtimes": runtimes})
        names, left_out = _installed(request)
        with open_display(errors) as display, ModelCheck(display.stage("doctor")) as look:
            prunable = look.prunable(model, revision)
            rows = list(look.deployable("pruned" if prunable.cut_share else "whole", names))
    deployable = [row.model_dump(mode="json") for row in rows]
    document = {"prunable": prunable.model_dump(mode="json"), "deployable": deployable, "left_out": left_out}
    print_result(document, model_tables(prunable, rows, left_out), is_json=json_)
    raise typer.Exit(0 if any(not row.refused for row in rows) else 1)


def _installed(request: Request) -> tuple[list[RuntimeName], list[str]]:
    from profiling_agent.runtimes import registry

    names, left_out = list[RuntimeName](), list[str]()
    for name in request.runtime_names:
        reason = registry.missing(name)
        if reason and request.names_runtimes:
            raise RequestError(f"runtimes asks for {name}, but {reason}")
        if reason:
            left_out.append(f"{name}: {reason}")
        elif registry.runtime(name).is_slow_to_convert and not request.names_runtimes:
            left_out.append(f"{name}: it compiles for minutes; --runtimes {name} tries it")
        else:
            names.append(name)
    return names, left_out


def doctor(  # noqa: PLR0913, PLR0917 - one is an old flag
    output: Annotated[Path, typer.Option(help="folder that would hold the run folders")] = Path("runs"),
    llm: Annotated[str, typer.Option(help="the language model that would plan")] = "none",
    base_url: Annotated[str | None, typer.Option(help="address of its server")] = None,
    advisor: Annotated[str | None, typer.Option(hidden=True)] = None,
    device: Annotated[
        str, typer.Option(help="device to test: cpu, cuda, or auto for a CUDA device where there is one")
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="look at this model instead: what can be cut of it and deployed here, found by doing it"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="the model's branch, tag or commit on the Hub")] = None,
    runtimes: Annotated[
        str,
        typer.Option(
            help="with --model: which to try, as in `eager,inductor`; auto leaves inductor out, which compiles for minutes"
        ),
    ] = "auto",
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Look at this machine: versions, CPU, memory, disk, noise, each runtime by running a model, the language model's server, a CUDA device.

    The device is tested by a small model that is profiled, pruned and evaluated on it; what failed is shown.

    With --model the model is looked at instead. A quarter is cut off every part of it that can be cut, that is brought into
    every deployment that is installed here and opened again elsewhere, and what is refused has its reason. No data set is needed;
    how much accuracy a deployment costs is for a run to tell.

    Ends with 1 where something would keep a run from working.
    """
    if model is not None:
        look_at_model(model, revision=revision, runtimes=runtimes, json_=json_)
        return
    from profiling_agent.cli.doctor import examine
    from profiling_agent.cli.tables import findings_table

    with exit_on_errors():
        fields: dict[str, Any] = {"output": str(output), "llm": llm, "base_url": base_url, "device": device}
        fields, lines = current_names(fields | ({} if advisor is None else {"advisor": advisor}), are_flags=True)
        for line in lines:
            errors.print(line, markup=False, soft_wrap=True)
        request = Request.model_validate(fields)
        with open_display(errors) as display:
            findings = list(examine(request, display.stage("doctor")))
    print_result([finding.model_dump() for finding in findings], findings_table(findings), is_json=json_)
    raise typer.Exit(1 if any(row.state == "problem" for row in findings) else 0)
