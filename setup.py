from setuptools import find_packages, setup

setup(
    name="megazoo",
    version="0.1.0",
    description="GPT-2, LLaMA and MPT from tensor-parallel layers, the same in every layout",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["megazoo", "megazoo.*"]),
    install_requires=[
        "torch>=2.11",
        "numpy",
        "safetensors>=0.5",
        "sentencepiece",
        "tiktoken",
        "einops>=0.8",
        "tqdm",
        "tyro>=0.9",
        "zlib-ng>=0.5",
        "msgspec>=0.20",
    ],
    extras_require={
        "zst": ["zstandard"],
        "plots": ["matplotlib"],
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        "bench": ["transformers>=5", "accelerate"],
        "test": [
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "tensorboard",
            "transformers>=5",
            "protobuf",
            "zstandard",
        ],
    },
)
