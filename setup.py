"""Metadata is in pyproject.toml. Here is what it cannot say: the kernels in cuda/ install as data of ``fw_fairseq.cuda``, and
``--user-dir fw_fairseq`` finds an editable installation."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel


class EditableWheel(editable_wheel):
    """Leaves a file where fairseq looks for the folder of ``--user-dir``, beside itself. fw_fairseq/late_registration.py does then
    what fairseq does in a folder."""

    def _install_namespaces(self, installation_dir, pth_prefix):
        super()._install_namespaces(installation_dir, pth_prefix)
        (Path(installation_dir) / "fw_fairseq").write_text(f"{Path(__file__).resolve().parent / 'fw_fairseq'}\n")


setup(
    packages=[*find_packages(include=["fw_fairseq*"]), "fw_fairseq.cuda"],
    package_dir={"fw_fairseq.cuda": "cuda"},
    package_data={
        "fw_fairseq": ["py.typed"],
        "fw_fairseq.cuda": ["*.cu", "*.cuh"],
        "fw_fairseq.ops.native": ["*.cpp", "*.h"],
    },
    cmdclass={"editable_wheel": EditableWheel},
)
