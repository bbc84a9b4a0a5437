"""Digests of what the FlashInfer patch wraps or relies on: sha256 of the raw source, and where it was read.

Append a digest when a release was checked by a person; replace when releases leave the range. Print those of
an installed release with ``vllm-specpatch fingerprint``.
"""

FLASHINFER_BACKEND_DIGESTS: dict[str, dict[str, str]] = {
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.__init__": {
        "d63f9c6616ecd0cc977f46e8fb8b8797a3f6d554aecfd09b94b911aa96e5c789": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.get_cudagraph_support": {
        "1aa15da932eca29587038ce7a4a5eafe053952098e64aeab5d4a64590c29f381": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.build": {
        "49a0b1ec7f2138df62d853c2b2f59450f78251a395c879502a650951614a17b7": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.get_q_data_type": {
        "d2c75b0477881ff7f7b9bcf810dc2d54df0a08bdbc4f747ba5d2ecddb428cfd0": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder._get_workspace_buffer": {
        "41dd51754af60c76de95c7ffc7313a52918724f6bd60cd37b04a6b3a9bde71cd": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder._get_decode_wrapper": {
        "637fbb897d9f154f9c259d113feaf64f1aec70dc0fddcbf9b9ebb801f49936a5": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder._compute_flashinfer_kv_metadata": {
        "bd5bde29d8baa6dda60766a77cdbbcc4e5443700124eb3b00bf498157f866002": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferImpl.forward": {
        "9113531e990823d5e9cab5fb4980eb42d4e071c7513a3e2dd4eb37ee684ec6b3": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.flashinfer:fast_plan_decode": {
        "dd074346481ef14becb2ba995a58e17ff72a202a7c3ddeb4688dd071f12c55d5": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backend:AttentionMetadataBuilder._init_reorder_batch_threshold": {
        "5576b794ff347c8626f5c8a49bc3abcc5761c968b6dd29feec646f94338dfbea": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_cudagraph_capture": {
        "b283663446b10f8ea4d615fed95bd60d39cf3cbc8ab31d2fde84eedead89bcdb": "vllm 0.27.0, 0.27.1",
    },
    "vllm.v1.attention.backends.utils:split_decodes_and_prefills": {
        "26f351f6370dc36a82d9818e0593e9fe825c9321e08bc9e8cb320c55949e5c29": "vllm 0.27.0, 0.27.1",
    },
    "vllm.utils.flashinfer:supports_trtllm_attention": {
        "ca10d78a9615ab5ecd04d48610d9bc7490267abd26b963096ae58ecadd086982": "vllm 0.27.0, 0.27.1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.__init__": {
        "1cad649cd300ae3b1ae729c53c0b8e8310bdf5a42e58f966d59fb9d470f177f2": "flashinfer 0.6.16 to 0.6.18.post1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": {
        "c12411d081d52b08e0883e070ec5ba1d50e9db563755d82dfe063c4791454105": "flashinfer 0.6.16 to 0.6.18.post1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.workspace_size": {
        "bdded681f1146441b09dd26d9c598325b3f1c3d71c0b061c4d2985e13364bafe": "flashinfer 0.6.16 to 0.6.18.post1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper._plan_impl": {
        "47aba3baa4fe64e98fdc5644abc4541371c810ffa7c7f1a9718176df0563d527": "flashinfer 0.6.16 to 0.6.18.post1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.run": {
        "d9e24d2ad1c1ebbe31c7399babc7708d6b79779635a99ebde0bd7ef58ffe0df0": "flashinfer 0.6.16 to 0.6.17",
        "e1d6e464095406a61111b210266b47f6d4ddd6863693ddf4db373fff6a5466c4": "flashinfer 0.6.18, 0.6.18.post1",
    },
    "flashinfer.decode:fast_decode_plan": {
        "d49cc126d6b6040eec373798860a3753129924b4ddcb0a14ddb96db71331a10d": "flashinfer 0.6.16 to 0.6.18.post1",
    },
}
