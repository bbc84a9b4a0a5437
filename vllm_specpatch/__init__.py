"""vllm-specpatch: FULL CUDA graphs for FlashInfer speculative decoding on pinned vLLM releases.

The package in one minute:

* ``vllm_specpatch`` (this folder) knows how to patch and nothing of any patch: doors (:mod:`.bootstrap`,
  :func:`register`), post-import hooks (:mod:`.hooks`), gates (:mod:`.gate`, :mod:`.fingerprint`), and the
  only place that sets an attribute (:mod:`.ledger`).
* ``vllm_specpatch.patches`` knows vLLM and nothing of hooks.
* ``vllm_specpatch.kernels`` knows CUDA and FlashInfer and nothing of vLLM.

Importing this package imports neither torch nor vLLM, and not even wrapt: it runs at the start of every
Python in the environment.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "register", "status", "unpatch"]


def register() -> None:
    """The ``vllm.general_plugins`` entry point. Re-entrant; raises with ``VLLM_SPECPATCH=strict`` only."""
    from .bootstrap import open_door

    open_door("vllm.general_plugins entry point")


def status() -> dict:
    """What was decided and done in this process, as plain data.

    Keys: ``version``, ``mode``, ``route``, ``doors`` (which were opened, in order), ``error`` (a wrong
    setting) and ``patches``: name -> ``state`` (applied, waiting, not needed, disabled, refused, late,
    failed), ``reason``, ``wanted``, ``found``, ``next_step`` and ``decisions`` (one per model
    configuration that vLLM built in this process).
    """
    from .hooks import current_status

    return current_status()


def unpatch() -> list[str]:
    """Puts the original attributes back; returns a line per attribute and one on what stays captured.

    CUDA graphs that were captured, and metadata builders that were made, while patched keep their decode
    wrappers and their reorder threshold, and go on working as captured: while such builders live, the
    attributes that they run through stay wrapped, which changes nothing for others; a later call puts those
    back. Engines started after this call are stock. A symbol that someone else wrapped on top of us is left
    alone, and the line says so.
    """
    from .hooks import deactivate

    return deactivate()
