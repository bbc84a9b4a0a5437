"""Verify attention for speculative decoding, planned on the GPU.

The folder knows CUDA, torch and FlashInfer's headers; it knows no vLLM. It installs as
``vllm_specpatch.kernels``; modules here import each other relatively, and torch or FlashInfer
only inside functions, so importing this package costs nothing and needs neither.

======================  =======================================================================
``spec_mask``           the public surface: ``Spec``, ``load``, ``Plan``, ``run``, mask words
``build``               compiles, caches, prebuilds and finds the CUDA modules
``probe``               a module against ``reference`` on the GPU, before it serves
``reference``           the same operation in plain torch, slow and obvious; the only oracle
``csrc/planner.cuh``    the split-KV plan as pure logic, compiled with g++ by the tests
``csrc/*.cuh, *.cu``    attention, merge and binding, with FlashInfer's wrappers of PTX; the
                        tests run all but the launches on emulated thread blocks
======================  =======================================================================
"""

if __name__ == "kernels":
    # A checkout's root on sys.path would otherwise hide the `kernels` package of Hugging Face.
    raise ImportError(
        "this folder is vllm_specpatch.kernels, not the package `kernels`: install the project "
        "(pip install -e .) and import vllm_specpatch.kernels, or start Python outside the checkout"
    )

__all__ = ["build", "probe", "reference", "spec_mask"]
