"""Metadata is in pyproject.toml. Here is what it cannot say: the kernels in cuda/ install as data of ``fw_fairseq.cuda``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fw_fairseq*"]), "fw_fairseq.cuda"],
    package_dir={"fw_fairseq.cuda": "cuda"},
    package_data={
        "fw_fairseq": ["py.typed"],
        "fw_fairseq.cuda": ["*.cu", "*.cuh"],
        "fw_fairseq.ops.native": ["*.cpp", "*.h"],
    },
)
