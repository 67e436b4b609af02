"""Root of the tree, and the guard against a second owner of it.

megatron-core installs files under `megatron/core` too, so in one environment whichever was installed last
overwrites the other piecemeal. The guard stands here and not in `megatron/core/__init__.py`, because megatron-core
ships a file of that name and none of this one: installed in either order, this one is found and runs first.
"""

from importlib.metadata import PackageNotFoundError, version


def _refuse_megatron_core() -> None:
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        return
    raise ImportError(
        f"megatron-core {found} is installed beside megatron-dsa and both own the package megatron/core: "
        "pip uninstall megatron-core, then reinstall megatron-dsa, or give each its own virtual environment."
    )


_refuse_megatron_core()
