"""Environment of child processes, by allow-list: they read strangers' files, and keys and tokens are no business of theirs."""

import os
import re
from collections.abc import Collection, Mapping

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Asking whether there is a GPU then makes no CUDA context, so that a process can still be forked.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SETTINGS = """
    PATH HOME USER LOGNAME SHELL TMPDIR TMP TEMP LANG LANGUAGE TZ TZDIR TERM NO_COLOR
    LD_LIBRARY_PATH LD_PRELOAD VIRTUAL_ENV CONDA_PREFIX LOCALE_ARCHIVE MPLCONFIGDIR
    CC CXX CFLAGS CXXFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX
    SDKROOT MACOSX_DEPLOYMENT_TARGET
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE DO_NOT_TRACK
"""
# What settings of libraries begin with: threads, memory, devices, caches, offline; and our own.
BEGINNINGS = """
    LC_ XDG_ DYLD_ NIX_ CCACHE_ PYTHON COVERAGE_ COV_CORE_ PROFILING_AGENT_
    HF_ HUGGINGFACE_ TRANSFORMERS_ DATASETS_ SAFETENSORS_ TOKENIZERS_ RAYON_ ARROW_ NPY_
    TORCH PYTORCH_ ATEN_ INDUCTOR_ TRITON_ KINETO_ CUDA CUBLAS CUDNN NVIDIA_ NCCL_ HIP_ HSA_ ROCR_ ROCM_ MIOPEN_
    ORT_ ONNX OV_ OPENVINO_ NNCF_
    OMP_ GOMP_ KMP_ MKL_ ONEDNN_ DNNL_ OPENBLAS_ BLIS_ NVPL_ VECLIB_ NUMEXPR_ TBB_ LOKY_ JOBLIB_
    MALLOC_ GLIBC_ JEMALLOC_ TCMALLOC_
"""
NAMES, PREFIXES = frozenset(SETTINGS.split()), tuple(BEGINNINGS.split())
# A word of a name that says its value is nobody's business, whatever the name begins with.
SECRET = frozenset({"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "AUTH"})
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy")
# A user and a password in an address; a proxy's may come without its scheme.
PASSWORD = re.compile(r"://[^/\s]*@")
# What only whoever fetches from the Hub may see.
HUB = ("HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_DISABLE_IMPLICIT_TOKEN", *PROXIES)


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a child's environment: settings and no secrets, no progress bars, no telemetry, no parallel tokenizers."""
    return {name: value for name, value in environment.items() if _is_open(name, value)} | QUIET


def withheld(names: Collection[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return which of these variables there are that children don't see unless they are given them."""
    return {name: environment[name] for name in names if name in environment and not _is_open(name, environment[name])}


def _is_open(name: str, value: str) -> bool:
    if name in PROXIES:
        return "@" not in value
    if PASSWORD.search(value):
        return False
    return name in NAMES or (name.startswith(PREFIXES) and not SECRET & set(name.upper().split("_")))
