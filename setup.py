"""Packaging. The core needs torch and numpy, which torch sends objects with; everything else is an extra.

A lower bound is what `make versions` has run the tests on, and so is torch's upper one: sharded parameters, checkpoints
and compiled blocks reach into it, and on torch 2.15 tests fail.

ColossalAI cannot be an extra: 0.5.0 pins torch<=2.5.1 and diffusers==0.29.0. Install it with
``pip install --no-deps colossalai==0.5.0`` into an environment of its own (see docs/colossalai.md).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

PLOT = ["matplotlib>=3.10", "jinja2>=3.1", "pydantic>=2.11"]
TRAIN = [
    *PLOT,
    "diffusers>=0.42.1",
    "transformers>=5.6",
    "accelerate>=1.15",
    "safetensors>=0.6",
    "tokenizers>=0.22",
    "peft>=0.19",
    "av>=17.1",
    "pillow>=11",
    "psutil>=7",
    "rich>=14",
    "tyro>=1.0.6",
    "tensorboard>=2.20",
    "torchdata>=0.11",
]
LOWBIT = ["torchao>=0.18"]
TRACKERS = ["wandb", "trackio"]
SCHEDULEFREE = ["schedulefree>=1.4"]
# torch for CUDA brings it along; it is for a torch that does not.
KERNELS = ["triton>=3.7"]
DEV = ["pytest", "pytest-xdist", "hypothesis", "prodigyopt", "ruff", "mypy"]


PACKAGE = Path(__file__).with_name("opensora_accel") / "__init__.py"
VERSION = re.findall(r'^__version__ = "(.*)"$', PACKAGE.read_text(encoding="utf-8"), re.M)[0]


def describe() -> str:
    """README.md as a page of its own: a link into the source tree is its text, a picture of the tree is left out."""
    page = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    page = re.sub(r"!\[[^\]]*\]\((?!https:)[^)]*\)\n*", "", page)
    return re.sub(r"\[([^\]]*)\]\((?!https:)[^)]*\)", r"\1", page)


setup(
    name="opensora-accel",
    version=VERSION,
    description="Exact sequence parallelism, offload and sharding for training video diffusion transformers",
    long_description=describe(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "sequence parallelism",
        "ring attention",
        "video diffusion",
        "transformers",
        "activation offload",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["opensora_accel*", "shardformer*"]),
    package_data={"opensora_accel": ["py.typed", "*/*.html", "*/*.css"], "shardformer": ["py.typed"]},
    install_requires=["torch>=2.12,<2.14", "numpy>=2.0"],
    extras_require={
        "train": TRAIN,
        "plot": PLOT,
        "lowbit": LOWBIT,
        "trackers": TRACKERS,
        "schedulefree": SCHEDULEFREE,
        "kernels": KERNELS,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["opensora-accel=opensora_accel.cli:main"]},
)
