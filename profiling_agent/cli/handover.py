"""`pick`, `export`, `push`: the commands that take a model home."""

from pathlib import Path
from typing import Annotated

import typer

from profiling_agent.cli.terminal import JsonOption, RunArgument, console, echo_json, refusing, run_folder

SourceArgument = Annotated[
    Path,
    typer.Argument(parser=run_folder, metavar="RUN_OR_FOLDER", help="run (its best model), or a saved model"),
]


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def pick(
    run: RunArgument,
    objective: Annotated[
        str | None,
        typer.Option(metavar="speed|size|memory|accuracy", help="what the contract would have preferred"),
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(metavar="NUMBER|NAME", help="one of the list, or `openvino static`")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder to write; nothing is overwritten, the run stays as it is")
    ] = None,
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Take another model of a finished run than the one it returned; nothing is measured again.

    Without `--objective` and `--candidate` all that the run measured is listed: on search images, and whether anything beats
    it. With one of them the model is copied to `--output`, to be loaded, exported or pushed. By an objective it is the one
    that the run's contract would have chosen with it: that keeps its terms first. Only what the run returned was judged on
    held-out images; of every other this says so.

    `profiling-agent pick runs/my-run --objective size --output small`
    """
    from profiling_agent.cli.tables import candidates_table, picked_table
    from profiling_agent.handover.candidates import candidates
    from profiling_agent.handover.pick import pick as take

    with refusing():
        if objective is None and candidate is None and output is None:
            found = candidates(run)
            if json_:
                echo_json([one.model_dump(mode="json") for one in found])
            else:
                console.print(candidates_table(found))
            return
        if output is None:
            raise typer.BadParameter("name a folder to write it to: --output small")
        picked = take(run, output, objective=objective, candidate=candidate)
    if json_:
        echo_json(picked.model_dump(mode="json"))
        return
    console.print(picked_table(picked))
    _say(f"wrote {output}")


def export(
    source: SourceArgument,
    output: Annotated[Path, typer.Option(help="folder (files, hf) or file (onnx) to write; nothing is overwritten")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="files|onnx|hf",
            help="files: a folder that runs without profiling-agent; onnx: one file for ONNX Runtime; hf: a folder for from_pretrained",
        ),
    ] = "files",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="onnx, of a model of torch: fix the batch; else any batch will do")
    ] = None,
) -> None:
    """Write a model for machines without profiling-agent, after checking that it computes the same there.

    `files` takes every deployment, as it is: an ONNX graph, OpenVINO's, or safetensors, int8 ones too; with the images'
    preparation and the labels as JSON, and a `load.py` that imports numpy, pillow and the runtime alone. `onnx` takes float32
    models of torch, and graphs for ONNX Runtime; `hf` float32 models, and ones in bfloat16 or float16 whose logits stay the same
    when all of the model is. A pruned model is an ordinary Hugging Face folder only where its layers were cut alike; where they
    weren't, the reason is given and nothing is written.

    `profiling-agent export runs/my-run --output home`, then `python home/load.py image.png`
    """
    from profiling_agent.handover.export import export as write

    with refusing():
        said = write(source, format_, output, batch_size=batch_size)
    _say(said)


def push(
    source: Annotated[
        Path,
        typer.Argument(
            parser=run_folder,
            metavar="RUN_OR_FOLDER",
            help="run (its best model), a saved or picked model, or a folder that `export` wrote as files",
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
    from profiling_agent.handover.push import push as put

    with refusing():
        pushed = put(source, repo_id, private=private, update=update)
    _say(f"{pushed.url} holds {', '.join(pushed.files)} (commit {pushed.commit[:12]})")
