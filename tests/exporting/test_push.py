"""What is pushed is the model and its card, and nothing of the machine or the run; what can't be pushed is one line."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import deployments
import fake_hub
import pytest
import yaml

from profiling_agent.exporting.export import export
from profiling_agent.runtimes.artifact import HeldOutAccuracy, Recipe, write_card
from profiling_agent.runtimes.torch_artifact import load, save_deployed

# Runs in a process of its own: huggingface_hub reads HF_ENDPOINT once, when it is imported.
ASK = """
import json, os, sys
from profiling_agent import ProfilingAgentError, push

answers = {}
for name, token, source, repository, options in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    os.environ |= {"HF_TOKEN": token} if token else {}
    try:
        answers[name] = push(source, repository, **options)
    except ProfilingAgentError as error:
        answers[name] = str(error)
assert "torch" not in sys.modules
print(json.dumps(answers))
"""
SECRET = "/home/somebody/models/my-vit"
USERS = {"hf_mine": "me"}


def child(code, endpoint, home, **settings):
    """Return how a child process ended that has this Hub, and none of our own settings for it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    arguments = [sys.executable, *map(str, code)]
    return subprocess.run(arguments, env=kept | hub | settings, capture_output=True, text=True, check=False)


def ask(endpoint, home, *questions):
    done = child(["-c", ASK, json.dumps(questions, default=str)], endpoint, home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_models(models, source):
    """Write a model that was made from a path, one that was made from the Hub, what was exported of it, and damaged ones."""
    known = source.recipe.model_dump() | {
        "base_model": SECRET,
        "config": source.recipe.config | {"_name_or_path": SECRET},
    }
    source = replace(source, recipe=Recipe.model_validate(known))
    save_deployed(source, deployments.deployment("onnxruntime dynamic"), models / "local", num_threads=1)
    shutil.copytree(models / "local", models / "based")
    recipe = json.loads((models / "based" / "recipe.json").read_text())
    made_from = {"base_model": "acme/vit", "base_revision": fake_hub.COMMIT}
    (models / "based" / "recipe.json").write_text(json.dumps(recipe | made_from))
    judged = HeldOutAccuracy(dataset="acme/insects", config="small", split="test", top1=0.875)
    write_card(models / "based", judged=judged)
    export(models / "based", "onnx", models / "exported")
    shutil.copytree(models / "local", models / "damaged")
    (models / "damaged" / "model.onnx").write_bytes(b"other")
    shutil.copytree(models / "exported", models / "changed")
    (models / "changed" / "run.py").write_text("raise SystemExit")


def write_runs(models):
    """Write a finished run with all that must not go up, and one without a model; return the first."""
    run = models / "run"
    (run / "jobs").mkdir(parents=True)
    for name in ("request.json", "worker.log", "llm.jsonl", "report.html"):
        (run / name).write_text("mine")
    shutil.copytree(models / "local", run / "jobs" / "model")
    (run / "best").symlink_to("jobs/model")
    (models / "unfinished").mkdir()
    (models / "unfinished" / "request.json").write_text("{}")
    return run


@pytest.fixture(scope="module")
def world(tmp_path_factory, sources):
    """Return what a Hub holds after a few pushes, what they said, and what the Hub was asked."""
    root, home, models = (tmp_path_factory.mktemp(name) for name in ("hub", "home", "models"))
    write_models(models, sources("vit"))
    run = write_runs(models)
    for name, file in (("acme/vit", "config.json"), ("me/notes", "notes.txt")):
        (root / "models" / name).mkdir(parents=True)
        (root / "models" / name / file).write_text("{}")
    cli = ("-m", "profiling_agent.cli.main", "push", run, "me/commanded")
    with fake_hub.serve(root, USERS) as hub:
        hub.made["acme/vit"] = {"cardData": {"license": "apache-2.0"}}
        answers = ask(
            hub.address, home,
            ("no token", None, run, "me/small", {}),
            ("run", "hf_mine", run, "me/small", {"private": True}),
            ("again", "hf_mine", run, "me/small", {}),
            ("based", "hf_mine", models / "based", "me/based", {}),
            ("public", "hf_mine", models / "exported", "me/based", {"update": True, "private": True}),
        )  # fmt: skip
        # What somebody adds on the Hub's pages.
        (root / "models/me/based/LICENSE").write_text("mine")
        answers |= ask(
            hub.address, home,
            ("exported", "hf_mine", models / "exported", "me/based", {"update": True}),
            ("not ours", "hf_mine", run, "me/notes", {"update": True}),
            ("to another", "hf_mine", run, "other/new", {}),
            ("bad token", "hf_wrong", run, "me/new", {}),
            ("no owner", "hf_mine", run, "small", {}),
            ("damaged", "hf_mine", models / "damaged", "me/new", {}),
            ("changed", "hf_mine", models / "changed", "me/new", {}),
            ("unfinished", "hf_mine", models / "unfinished", "me/new", {}),
        )  # fmt: skip
        commands = [child(cli, hub.address, home, HF_TOKEN="hf_mine") for _ in range(2)]
    answers |= ask(hub.address, home, ("unreachable", "hf_mine", run, "me/new", {}))
    return root / "models", answers, hub, commands


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def metadata_of(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


@pytest.mark.slow
def test_a_runs_model_goes_up_whole_without_a_path_of_the_machine_and_loads_from_there(world):
    root, answers, hub, _ = world

    assert answers["run"] == f"{hub.address}/me/small/commit/{fake_hub.COMMIT}"
    assert hub.made["me/small"]["visibility"] == "private"
    files = {"README.md", "golden.safetensors", "model.onnx", "preprocessor_config.json", "recipe.json"}
    assert names_in(root / "me/small") == sorted(files | {".gitattributes"})
    assert load(root / "me/small").runtime == "onnxruntime"
    assert not any(b"/home/somebody" in path.read_bytes() for path in (root / "me/small").iterdir())
    assert json.loads((root / "me/small/recipe.json").read_text())["base_model"] == "my-vit"
    assert "Made from `my-vit`" in (root / "me/small/README.md").read_text()


def test_exported_files_replace_what_was_pushed_before_and_nothing_else_with_a_card_for_the_hub(world):
    root = world[0]
    exported = ("README.md", "export.json", "labels.json", "model.onnx", "prepare.py", "preprocessing.json", "run.py")

    card = metadata_of(root / "me/based")

    assert names_in(root / "me/based") == sorted([".gitattributes", "LICENSE", *exported])
    assert (card["library_name"], metadata_of(root / "me/small")["library_name"]) == ("onnx", "profiling-agent")
    assert (card["base_model"], card["base_model_relation"], card["license"]) == ("acme/vit", "quantized", "apache-2.0")
    assert (card["datasets"], card["pipeline_tag"]) == (["acme/insects"], "image-classification")
    (result,) = card["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "value": 0.875}]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("no token", "needs a token, and there is none: log in with `hf auth login`, or set HF_TOKEN"),
        ("again", "'me/small' exists on the Hub and holds README.md, golden.safetensors, model.onnx, "),
        ("not ours", "holds notes.txt: push to another name, or choose one that profiling-agent made"),
        ("public", "'me/based' exists on the Hub and is public: make it private there, or leave --private out"),
        ("to another", "You don't have the rights to create a model under 'other'"),
        ("bad token", "check the name, the network and that your token may write there; log in with `hf auth login`"),
        ("no owner", "'small' names no owner: give the repository as owner/name"),
        ("damaged", "isn't the file that was saved"),
        ("changed", "run.py' isn't the file that was exported"),
        ("unfinished", "has no model yet: finish it with"),
        ("unreachable", "(ConnectError ('[Errno 111] Connection refused')), and nothing was committed: check"),
    ],
)
def test_what_can_not_be_pushed_is_one_line(world, what, says):
    _, answers, _, _ = world

    assert says in answers[what]
    assert len(answers[what].splitlines()) == 1
    assert "hf_" not in answers[what]


def test_what_was_refused_made_no_repository_and_the_command_ends_with_code_2_and_one_line(world):
    root, _, hub, (done, refused) = world

    assert names_in(root / "me") == ["based", "commanded", "notes", "small"]
    assert not (root / "other").exists()
    assert names_in(root / "me/notes") == ["notes.txt"]
    assert (done.returncode, refused.returncode) == (0, 2)
    assert done.stdout == f"pushed to {hub.address}/me/commanded/commit/{fake_hub.COMMIT}\n"
    assert "with --update" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
