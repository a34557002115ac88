"""What child processes see of the environment."""

from profiling_agent.jobs.tasks import TABLE, AcquireTask
from profiling_agent.processes.child import HUB, child_environment, withheld

SECRETS = (
    "OPENAI_API_KEY AZURE_OPENAI_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_TOKEN_PATH AWS_SECRET_ACCESS_KEY GITHUB_TOKEN "
    "LANGSMITH_API_KEY MLFLOW_TRACKING_URI MLFLOW_TRACKING_PASSWORD DATABASE_URL SSH_AUTH_SOCK PROFILING_AGENT_SECRET "
    "PYTHON_REGISTRY_PASSWORD TORCH_HUB_TOKEN CUDA_API_KEY ANYTHING_ELSE"
)
SETTINGS = (
    "PATH HOME TMPDIR LANG LC_ALL TZ USER XDG_CACHE_HOME LD_LIBRARY_PATH CXX SSL_CERT_FILE HF_HOME HF_HUB_OFFLINE HF_ENDPOINT "
    "TRANSFORMERS_OFFLINE HF_DATASETS_CACHE PROFILING_AGENT_CACHE PYTHONPATH COVERAGE_PROCESS_START CUDA_VISIBLE_DEVICES "
    "OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY TORCHINDUCTOR_CACHE_DIR TORCH_HOME MALLOC_ARENA_MAX ORT_CUDA_FLAGS "
    "OV_CPU_THREADS PYTORCH_CUDA_ALLOC_CONF"
)


def test_no_secret_and_every_setting_reaches_a_child():
    environment = dict.fromkeys([*SECRETS.split(), *SETTINGS.split()], "x")

    assert child_environment(environment).keys() & environment.keys() == {*SETTINGS.split()}


def test_a_proxy_reaches_every_child_unless_it_has_a_password():
    environment = {"HTTPS_PROXY": "http://proxy:3128", "http_proxy": "http://me:pw@proxy:3128", "no_proxy": "localhost"}

    assert {"HTTPS_PROXY", "no_proxy"} == child_environment(environment).keys() & environment.keys()
    assert withheld(HUB, environment) == {"http_proxy": "http://me:pw@proxy:3128"}


def test_an_address_with_a_password_reaches_no_child_that_does_not_need_it():
    environment = {"HF_ENDPOINT": "https://me:pw@mirror.example", "HF_HOME": "/home/me@work"}

    assert child_environment(environment).keys() & environment.keys() == {"HF_HOME"}
    assert withheld(HUB, environment).keys() == {"HF_ENDPOINT"}


def test_the_hubs_token_is_for_the_jobs_that_read_a_model_where_it_was_found():
    held = {kind.__name__ for kind, row in TABLE.items() if row.secrets}

    assert held == {"AcquireTask", "LookTask", "MatchLabelsTask", "SurveyShapeTask", "ResolveShapeTask"}
    assert withheld(TABLE[AcquireTask].secrets, {"HF_TOKEN": "t", "OPENAI_API_KEY": "k", "HF_HOME": "h"}) == {
        "HF_TOKEN": "t"
    }
