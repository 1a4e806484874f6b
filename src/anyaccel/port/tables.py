# SPDX-License-Identifier: Apache-2.0
"""What the rules know about torch and other packages, as data; a test checks it against the interface and torch."""

from __future__ import annotations

import re

from anyaccel.cuda_names import CLASSES, DEVICE, FUNCTIONS, GRAPH_FUNCTIONS, NVTX, TYPED_TENSORS, Method

__all__ = ["CLASSES", "DEVICE", "FUNCTIONS", "GRAPH_FUNCTIONS", "NVTX", "TYPED_TENSORS", "Method"]


# Those that change nothing of what a program computes where the CPU is the accelerator.
HARMLESS = {"empty_cache", "manual_seed", "manual_seed_all", "set_device", "synchronize", "_lazy_call"}
HARMLESS |= {"reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats"}
# Every method that a fix may call; the test looks each up in the interface.
OTHER_METHODS = (
    *("device_name", "current_device", "current_device_name", "default_generator", "is_bf16_supported"),
    *("on_accelerator", "pin_memory", "communication_backend_name", "visible_devices_envs"),
    *("set_visible_devices_envs", "total_memory", "available_memory"),
)

# Parts of torch.cuda whose functions torch.cuda itself has too.
SUBMODULES = ("memory", "random", "streams", "graphs")

# torch.cuda.amp -> torch.amp: the parameters, in their order there; the device goes in front.
AMP = {
    "autocast": ("enabled", "dtype", "cache_enabled"),
    "GradScaler": ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    "custom_fwd": ("fwd", "cast_inputs"),
    "custom_bwd": ("bwd",),
}

# What to do about a part of torch.cuda that the interface does not have.
ADVICE = {
    "device": "pass device= to what creates tensors, or set_device() and restore it; device() is no context here",
    "device_of": "pass device=tensor.device to what creates tensors",
    "get_rng_state_all": "call get_rng_state(i) for each i in range(device_count())",
    "set_rng_state_all": "call set_rng_state(state, i) for each device",
    "seed": "draw a seed and pass it to manual_seed()",
    "seed_all": "draw a seed and pass it to manual_seed_all()",
    "get_device_properties": "total_memory() has the memory size; ask get_accelerator().has(...) for abilities",
    "get_device_name": "runtime_versions() and the accelerator's repr tell what it is; guard the rest",
    "get_device_capability": "ask for what you need: is_bf16_supported(), is_fp16_supported(), is_triton_supported()",
    "get_arch_list": "ask for what you need: is_bf16_supported(), is_fp16_supported(), is_triton_supported()",
    "mem_get_info": "available_memory() and total_memory() are its two values",
    "set_stream": "use `with get_accelerator().stream(s):`",
    "StreamContext": "use `with get_accelerator().stream(s):`",
    "ExternalStream": "only the vendor's runtime has it",
    "set_per_process_memory_fraction": "use the batch size, or a limit of the vendor's allocator",
    "memory_summary": "print memory_stats()",
    "memory_snapshot": "print memory_stats()",
    "utilization": "use the vendor's tool",
    "init": "the accelerator starts by itself; remove the call",
    "is_initialized": "the accelerator starts by itself; no counterpart",
    "ipc_collect": "only CUDA shares device memory this way; guard it",
    "graph_pool_handle": "keep one graph's pool(): capture_to_graph(graph, pool=other.pool())",
    "make_graphed_callables": "capture with create_graph() and capture_to_graph()",
    "CharTensor": "torch.empty(..., dtype=torch.int8, device=get_accelerator().device_name())",
    "ShortTensor": "torch.empty(..., dtype=torch.int16, device=get_accelerator().device_name())",
    "BoolTensor": "torch.empty(..., dtype=torch.bool, device=get_accelerator().device_name())",
    "nvtx": "torch.profiler.record_function marks a range on every device; range_push() and range_pop() are there",
    "profiler": "use torch.profiler",
    "nccl": "use torch.distributed",
    "comm": "use torch.distributed",
    "cudart": "only CUDA has it; register_host_memory() page-locks host memory",
    "check_error": "only CUDA has it; guard it",
    "is_bf16_supported": "torch's answer counts emulation (true on a V100), get_accelerator().is_bf16_supported() "
    "does not: use the latter where speed is asked for, or pass including_emulation=False",
    "current_device": "current_device() gives the index, current_device_name() what device= takes: choose one",
}
NO_COUNTERPART = "the accelerator interface has no counterpart; guard it or rewrite it"

# Names that hold one device, and keyword arguments that take one.
DEVICE_NAME = re.compile(
    r"(?:\w*_)?(?:torch)?device(?:_type|_name|_str|_string|_map)?_*|map_location|_*dev", re.IGNORECASE
)
DEVICES_NAME = re.compile(r"(?:\w*_)?devices?", re.IGNORECASE)
DEVICE_OPTION = re.compile(r"(?:^|[-_])device$|^-d$", re.IGNORECASE)
INDEX_NAME = re.compile(
    r"(?:\w*_)?(?:device_ids?|device_idx|device_index|device_num|index|idx|rank|gpu|gpus|gpu_ids?|id|i|ordinal)",
    re.IGNORECASE,
)
# Names that hold how many processes are started, which is what a number of devices may become on every accelerator.
BACKEND_NAME = re.compile(r"(?:\w*_)?backend(?:_name)?", re.IGNORECASE)

# Function -> position of its device argument.
DEVICE_POSITIONS = {
    "torch.device": 0,
    "torch.autocast": 0,
    "torch.amp.autocast": 0,
    "torch.amp.autocast_mode.autocast": 0,
    "torch.amp.GradScaler": 0,
    "torch.GradScaler": 0,
    "torch.Generator": 0,
    "torch.set_default_device": 0,
    "torch.get_autocast_dtype": 0,
    "torch.is_autocast_enabled": 0,
    "torch.get_device_module": 0,
    "torch.distributed.init_device_mesh": 0,
    "torch.distributed.device_mesh.init_device_mesh": 0,
    "torch.distributed.device_mesh.DeviceMesh": 0,
    "torch.load": 1,
}
DEVICE_POSITIONS |= {f"torch.cuda.{name}": 0 for name, m in FUNCTIONS.items() if m.parameters[:1] == (DEVICE,)}

# What options are kept in, whose `cuda` and `is_cuda` are flags.
OPTIONS = {"args", "opt", "opts", "options", "config", "cfg", "hparams", "params", "self", "cls", "flags", "FLAGS"}

# Packages whose device= means CUDA or nothing, so that another device's name would be refused.
FOREIGN = {
    *("catboost", "ctranslate2", "cuml", "cupy", "dali", "faster_whisper", "faiss", "flax", "haiku", "insightface"),
    *("jax", "lightgbm", "llama_cpp", "mxnet", "numba", "nvidia", "onnxruntime", "openvino", "paddle", "rapidocr"),
    *("spacy", "taichi", "tensorflow", "tensorrt", "tf", "tvm", "vllm", "warp", "xgboost"),
}

# Packages that know tensors of CUDA and of the CPU only, or of CUDA only: what a file that uses one picks is for it.
# Lua's modules of torch before 1.0 have `cuda()` but no `to()`.
CUDA_OR_CPU = {
    *("cupy", "cupyx", "dgl", "numba.cuda", "nvalchemiops", "pycuda", "tensorrt", "warp"),
    *("torch.legacy", "torch.utils.serialization"),
}
# In the names of what makes or takes DGL's graphs, by whatever package: Graph.atom_dgl_multigraph.
OF_DGL = re.compile(r"\w+_dgl(?:_\w+)?|dgl_\w+")

# Packages that take the name of any of torch's devices; of others nobody here knows.
TAKES_ANY = {
    *(
        "accelerate",
        "anyaccel",
        "deepspeed",
        "diffusers",
        "einops",
        "gpytorch",
        "ignite",
        "kornia",
        "lightning",
        "monai",
    ),
    *("open_clip", "peft", "pytorch_lightning", "safetensors", "sentence_transformers", "timm", "torch", "torchaudio"),
    *(
        "torchmetrics",
        "torchvision",
        "transformers",
        "lightning_fabric",
        "linear_operator",
        "botorch",
        "torch_geometric",
    ),
    *(
        "tensordict",
        "torchrl",
        "torchdata",
        "torchao",
        "functools",
        "dataclasses",
        "os",
        "copy",
        "typing",
        "collections",
    ),
    *("argparse", "unittest", "pytest", "click", "typer", "fire", "logging", "multiprocessing", "threading", "numpy"),
}

# Of these, packages that pick the device, its type of numbers or its processes themselves, each in its own way.
HAS_ITS_OWN_WAYS = {"botorch", "deepspeed", "gpytorch", "linear_operator", "torch_geometric", "torchao", "torchrl"}
# Packages that know nothing of devices: what goes into them and comes out is for the CPU, and float32 where it is wide.
WITHOUT_DEVICES = {
    *("IPython", "PIL", "absl", "albumentations", "attr", "attrs", "boto3", "bs4", "colorama", "configargparse"),
    *("coloredlogs", "cv2", "datasets", "dotenv", "easydict", "editdistance", "evaluate", "fastapi", "filelock"),
    *("flask", "ftfy", "fvcore", "gdown", "google", "gradio", "h5py", "huggingface_hub", "hydra", "hydra_zen"),
    *("imageio", "imageio_ffmpeg", "inflect", "iopath", "ipywidgets", "jieba", "joblib", "json5", "jsonlines"),
    *("langid", "langdetect", "librosa", "lmdb", "loguru", "lpips", "lxml", "markdown", "matplotlib", "mlflow"),
    *("moviepy", "msgpack", "nbformat", "networkx", "nibabel", "nltk", "notebook", "omegaconf", "opencc", "orjson"),
    *("packaging", "pandas", "parameterized", "phonemizer", "pkg_resources", "plotly", "prettytable", "progressbar"),
    *("psutil", "pyarrow", "pycocotools", "pydantic", "pylab", "pypinyin", "pyworld", "regex", "requests", "rich"),
    *("ruamel", "sacrebleu", "scipy", "seaborn", "sentencepiece", "seqeval", "setuptools", "simplejson", "six"),
    *("skimage", "sklearn", "soundfile", "streamlit", "tabulate", "tensorboard", "tensorboardX", "termcolor"),
    *("terminaltables", "tgt", "tiktoken", "tokenizers", "toml", "tqdm", "typing_extensions", "ujson", "unidecode"),
    *("uvicorn", "wandb", "webdataset", "yacs", "yaml", "zmq"),
}

# Package -> advice. An import of it is reported.
CUDA_ONLY = {
    "amp_C": "torch.amp and torch.optim replace it",
    "apex": "torch.amp and torch.optim replace most of it",
    "auto_gptq": "transformers loads other quantised formats everywhere, GGUF among them",
    "bitsandbytes": "quantise with torchao, or load GGUF; anyaccel.ops has CPU optimizers",
    "causal_conv1d": "fall back to torch.nn.functional.conv1d",
    "cudf": "fall back to pandas",
    "cuml": "fall back to scikit-learn",
    "cupy": "use torch or numpy",
    "cupyx": "use torch or scipy",
    "flash_attn": "use torch.nn.functional.scaled_dot_product_attention",
    "flash_attn_interface": "use torch.nn.functional.scaled_dot_product_attention",
    "flashinfer": "use torch.nn.functional.scaled_dot_product_attention",
    "mamba_ssm": "fall back to the reference implementation in torch",
    "MinkowskiEngine": "needs another implementation on other devices",
    "nvidia": "guard it, or use an implementation in torch",
    "pycuda": "use torch",
    "spconv": "needs another implementation on other devices",
    "tensorrt": "use torch.compile with get_accelerator().get_compile_backend()",
    "tensorrt_llm": "use anyaccel.init_inference",
    "torch_tensorrt": "use torch.compile with get_accelerator().get_compile_backend()",
    "transformer_engine": "fall back to torch.nn layers",
    "xformers": "use torch.nn.functional.scaled_dot_product_attention",
}
# Tools and libraries of NVIDIA's driver.
MANAGEMENT = {"pynvml", "py3nvml", "nvidia_smi", "nvitop", "GPUtil", "gpustat"}
MANAGEMENT_ADVICE = "use device_count(), total_memory() and available_memory() of the accelerator"

# Things in torch that build CUDA sources.
EXTENSIONS = {
    "torch.utils.cpp_extension.CUDAExtension",
    "torch.utils.cpp_extension.CUDA_HOME",
    "torch.utils.cpp_extension._find_cuda_home",
}
EXTENSION_LOADERS = {"torch.utils.cpp_extension.load", "torch.utils.cpp_extension.load_inline"}

# Begins a cell where the cells of a notebook are one module.
CELL_MARK = "# anyaccel-cell:"
MAGIC_MARK = "# anyaccel-line:"

# A file in which none of these occurs has nothing to port.
WORDS = re.compile(
    r"cuda|nccl|device_ids|pin_memory|triton|nvidia|pynvml|py3nvml|GPUtil|gpustat|nvitop|bitsandbytes|flash_attn|flashinfer|apex|"
    r"xformers|cupy|cuml|cudf|mamba_ssm|tensorrt|transformer_engine|spconv|MinkowskiEngine|auto_gptq|amp_C|causal_conv1d|"
    r"device ?[=(] ?\d|\.to\( ?(?:\d|\w*(?:rank|gpu|device))",
    re.IGNORECASE,
)
