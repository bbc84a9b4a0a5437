"""Digests of what the FlashInfer patch wraps or relies on: sha256 of the raw source, and where it was read.

A digest counts from the release in its label until the release of the next one; ``absent`` says that a release
does not define the function. So a release in which nothing relevant moved adds nothing here, and
tests/upstream/test_digests.py proves the labels on the sources of every supported release. Append when a release
was checked by a person; print those of an installed one with ``vllm-specpatch fingerprint``.
"""

#: Gate the patch.
VLLM_DIGESTS: dict[str, dict[str, str]] = {
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.__init__": {
        "a9c43fe512a6a74b90c1e8454bde373b3724d2e21c3e8fdcae6acd54e0e754f2": "from vllm 0.24.0",
        "4ea61596bd2bf19eebce0d889a7300f45a2ddbcd5fc76666cf9fb9147dc22035": "from vllm 0.25.0",
        "d63f9c6616ecd0cc977f46e8fb8b8797a3f6d554aecfd09b94b911aa96e5c789": "from vllm 0.26.0",
        "6437f836acfbf3db34a2056561e8dfa3316e8ea39ec9d8a081bca2c34451e42f": "from vllm 0.28.0",
        "d67e092f2f5b9f04418577db70eb45f9893d31868787ee7e60c12935ae027fd7": "from vllm 0.29.0",
        "108fdbffd3ad1c0abb7302389acedda2416a9a31eb33d6412993ef88647257e2": "from vllm 0.30.0",
        "51b7b00fa4e08534f831154b71830535cbc07b707113068bb7e4cf7af58ca7a1": "from vllm 0.31.0",
        "39ade253bf3ad83c381ad1957544bb65c049d093fc800eedc2e3769f441f71d3": "from vllm 0.32.0",
        "1ba20f8cae385c395167fb15ff7aec396fa11a431bc26bb81ce0f838d2b2bafe": "from vllm 0.33.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.get_cudagraph_support": {
        "37297a7469881d3dba0fa8eee7865601707a2d3920b836dd52a8396b9a13c798": "from vllm 0.24.0",
        "bf5c0530a05937e51e3c2793ab678c676cdd8eb39a10e73241c69006cea8e757": "from vllm 0.25.0",
        "def427683345f6b35dc857ee4e58afe53156903617e95749c19a25ea173947e3": "from vllm 0.26.0",
        "1aa15da932eca29587038ce7a4a5eafe053952098e64aeab5d4a64590c29f381": "from vllm 0.27.0",
        "16f2204af6c488772c83510b86192ea862e6608b05cbedc969c845d269eba9a4": "from vllm 0.28.0",
        "7d810b7d58fbf5d2a960d5142f657e0ee928735864eaeaf64153f9413d1e08fa": "from vllm 0.29.0",
        "1572bbdb14213bcbf1221a0c12806e2f598999cc6cd0a9921bd6e225e5975725": "from vllm 0.30.0",
        "10ba8d5a7ce9b5912e81e984e0d7ac104552217f9bfc1987efab55814173f93f": "from vllm 0.32.0",
        "0cd22c09601d0d85e0eb856a42d3aa54b97a4c9dd3aa5926c56a29dae86eb935": "from vllm 0.33.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.get_varlen_cudagraph_max_query_len": {
        "absent": "from vllm 0.24.0",
        "79f6bebeed8e0d7bb7021a417fe613d74b9f3cc5eaff901c6b26639385f228b6": "from vllm 0.31.0",
        "a617641a51fd641be69af936b9f7af347293a79b42c07281b6bd7976d59cf38d": "from vllm 0.33.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferBackend.supports_device_cpu_query_lens_mismatch": {
        "absent": "from vllm 0.24.0",
        "9ecbb3a360ed156e34392210a1256768e98119920548bdf77a6dbc210d147b4f": "from vllm 0.28.0",
        "8749fd0ea4a351085de293a291197968c3e5bdea74b14c7af9c0caf3af943694": "from vllm 0.29.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.build": {
        "ca8b1dbec4fea28ea8588b456b04dd4acd2996ac7d4ce7298d520d3472d252c7": "from vllm 0.24.0",
        "184a6260d02b900cebd3ac7ad5e60a24765893532d4080201e1ec765944934a8": "from vllm 0.25.0",
        "49a0b1ec7f2138df62d853c2b2f59450f78251a395c879502a650951614a17b7": "from vllm 0.26.0",
        "7033590a279f6620d714b6818e54fed7ffd98b5b78d686e6d223a84c8ec6e4e1": "from vllm 0.28.0",
        "f53c5cab209c00b974f9efdd6cb5a85b9bd9c7e2c7de24bae487d54bccfc8734": "from vllm 0.29.0",
        "338560e17e28700a5a26cd7277f04d6495c64f7ae1a4b57f05de9e5294726cb0": "from vllm 0.30.0",
        "5d85d630cdad5b2738829293eadc0b740e6f7f0d37fe7d414420b646afa562b9": "from vllm 0.31.0",
        "7495c106b50a7ebf0ab11ee518f644730544b43854ba1c71267afe26366e0463": "from vllm 0.32.0",
        "4229c56e72feb8ae7892a72cafd097bbc3f2e5d8216c333edf61a3ffc260b496": "from vllm 0.33.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.get_q_data_type": {
        "absent": "from vllm 0.24.0",
        "d2c75b0477881ff7f7b9bcf810dc2d54df0a08bdbc4f747ba5d2ecddb428cfd0": "from vllm 0.25.0",
        "8f4a6c6471b0b768598213e5c17e8944279d898030510da3110b9326f354605c": "from vllm 0.28.0",
        "4e63e636ba19c2e8f523bdf54ed5fff3f99f30b7047a3e60ad19b2cbb29720fd": "from vllm 0.30.0",
        "22533c2e96d181f92d332ea10e24be7351230d6d55d4f67e449b3af873c26baa": "from vllm 0.32.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder._get_workspace_buffer": {
        "b9a199303ff7dcd8da4dee8f0ce698e055fe84f104b63b51d4667e3871603ab5": "from vllm 0.24.0",
        "41dd51754af60c76de95c7ffc7313a52918724f6bd60cd37b04a6b3a9bde71cd": "from vllm 0.26.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder._get_decode_wrapper": {
        "637fbb897d9f154f9c259d113feaf64f1aec70dc0fddcbf9b9ebb801f49936a5": "from vllm 0.24.0",
        "994d30ee49fdd8b16880cac751578989ff04ab1b5a8077ba87de4e527c0647f6": "from vllm 0.29.0",
        "f27a264b98d03a0a49b8550a8d37f6565009eb10032394f6317289695f0e95e6": "from vllm 0.32.0",
        "a2b67ad2b781fff7515f3faee492dce2721656647f208c3e7be690b043d94eb2": "from vllm 0.33.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder._compute_flashinfer_kv_metadata": {
        "bd5bde29d8baa6dda60766a77cdbbcc4e5443700124eb3b00bf498157f866002": "from vllm 0.24.0",
        "321636844699e2e89233df1a26a668d845e0996caafb79fc75ecfd6423990b63": "from vllm 0.29.0",
        "8b25a7ccd817da5cee79ef3c1b9516ff03c78cb1aad9d689e4bb50a32ac2b5ad": "from vllm 0.30.0",
        "5fd84606a1af2214fd84b671ec09132eeee98322e591e03a735af546b27f6a78": "from vllm 0.31.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferMetadataBuilder.kv_cache_layout": {
        "absent": "from vllm 0.24.0",
        "1b6bfdb8a45ead0ffcf93f494becac8840ddb1233866d01cefa405a2070ff060": "from vllm 0.29.0",
    },
    "vllm.v1.attention.backends.flashinfer:FlashInferImpl.forward": {
        "94b718427d2cc37fd064d4dd501dde51f7025829f477e3dd9c024c91a9667944": "from vllm 0.24.0",
        "d465326bf4e56e868e787562b920135edf2b5d85a9cb97b58f90f4a59266c7be": "from vllm 0.25.0",
        "9113531e990823d5e9cab5fb4980eb42d4e071c7513a3e2dd4eb37ee684ec6b3": "from vllm 0.26.0",
        "a2f5577ef362035dba026ffc3f015830c3be490240599d5fe21f31cf711cd13e": "from vllm 0.28.0",
        "17a1f736fc0a70f8e8bdd5fb09fb544abac7f4a6ebb34530d57e7081c1d37841": "from vllm 0.29.0",
        "246dedf39992b7ac94c585ebccf8708977644b62dd73a2b087bef6e5442cadf1": "from vllm 0.30.0",
        "78609a73947137efa8e498a728bf01229db783b67a5eaf64e07bd748fb0ba4df": "from vllm 0.31.0",
        "47f7cf4d6a2b8131d7c1b527be2a60a13385bcce9d647a1f1c1ccad1090b3bff": "from vllm 0.32.0",
        "5ecd8c1f51ef37e8c7eb10dd023d85d4903cf8599010a12513407264a4809af6": "from vllm 0.33.0",
    },
    "vllm.v1.attention.backends.flashinfer:fast_plan_decode": {
        "dd074346481ef14becb2ba995a58e17ff72a202a7c3ddeb4688dd071f12c55d5": "from vllm 0.24.0",
        "c7e6076b13bbc3c8ac19078e351e2d6293c65fb9215d20fce480160a02bbfa79": "from vllm 0.30.0",
        "da92aaf1826b0dc76324cc75fcd7c5f04f267f39f740eb43bb53a9a258e5e439": "from vllm 0.31.0",
        "b8a2828c7232318346b3add750d604cace75d6ec497767bb9946dbc2cd73151f": "from vllm 0.33.0",
    },
    "vllm.v1.attention.backends.flashinfer:_use_fa2_native_decode": {
        "absent": "from vllm 0.24.0",
        "a0bb04ee979e71eb8cff7ec95dfacbdbaba1490631cc7cdec7286487a0117b8a": "from vllm 0.33.0",
    },
    "vllm.v1.attention.backend:AttentionMetadataBuilder._init_reorder_batch_threshold": {
        "5576b794ff347c8626f5c8a49bc3abcc5761c968b6dd29feec646f94338dfbea": "from vllm 0.24.0",
        "58c7321ee8bac7e4c17046935bb65a20fbec25210a27c08245eb323f76e980d0": "from vllm 0.31.0",
    },
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_cudagraph_capture": {
        "b283663446b10f8ea4d615fed95bd60d39cf3cbc8ab31d2fde84eedead89bcdb": "from vllm 0.24.0",
        "098beee658c83564b66a51976439044c4ed2a90aa0de86ef136537b90e240ef3": "from vllm 0.31.0",
    },
    "vllm.v1.attention.backends.utils:split_decodes_and_prefills": {
        "1cb23aaeafc6205a88a25779c56db2a81c25451ad086ec8f62768e6fcd622cdf": "from vllm 0.24.0",
        "26f351f6370dc36a82d9818e0593e9fe825c9321e08bc9e8cb320c55949e5c29": "from vllm 0.26.0",
        "f007f7c52cb563c95edb6e3bf121d2bf6fd0be502d0faf9e961c36869d90ab34": "from vllm 0.31.0",
    },
    "vllm.v1.attention.backends.utils:get_kv_cache_layout": {
        "f22e380b68e6463c387bd2002865b3d575602314704730b855389497a9968cdf": "from vllm 0.24.0",
        "e5a4e3facafba87f1e212a379241523dd3f6aa3e4656f6b22d58ea99810b0e57": "from vllm 0.27.0",
        "absent": "from vllm 0.29.0",
    },
    "vllm.v1.attention.backends.utils:get_flashinfer_layout_string": {
        "absent": "from vllm 0.24.0",
        "c6fc111e9d42433f29010a583bbd7e3d891802e5eb0d08c2fee417acd0501f71": "from vllm 0.29.0",
    },
    "vllm.utils.flashinfer:supports_trtllm_attention": {
        "bd1adcff3d2266232fa538a42a7f19fbc9aa79c763f9ab704d52adf91af2242d": "from vllm 0.24.0",
        "ca10d78a9615ab5ecd04d48610d9bc7490267abd26b963096ae58ecadd086982": "from vllm 0.25.0",
        "936c5d1f9ab6e2cd91b08e1ecdcb4aeb1886264fd54c23f401cace613b79f187": "from vllm 0.28.0",
    },
}

#: Gate the route ``native`` only. Releases before 0.6.16 are refused by version (see native.py).
FLASHINFER_DECODE_DIGESTS: dict[str, dict[str, str]] = {
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.__init__": {
        "1cad649cd300ae3b1ae729c53c0b8e8310bdf5a42e58f966d59fb9d470f177f2": "from flashinfer 0.6.16",
        "19914c888af5c3e34a9e5adf8d33a47351066a30087ce3a048e41a5d7f79ce2f": "from flashinfer 0.7.0.post1",
        "cad118d89d5ef1982f22ecfab1e56213241a2f461ad20a663e9430c966f31aed": "from flashinfer 0.7.2.post1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": {
        "c12411d081d52b08e0883e070ec5ba1d50e9db563755d82dfe063c4791454105": "from flashinfer 0.6.16",
        "c4fb3fdfde7027e80693cb37e0489d5d4c489c54b0a1694662fe8fb318cfc902": "from flashinfer 0.7.2.post1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.workspace_size": {
        "bdded681f1146441b09dd26d9c598325b3f1c3d71c0b061c4d2985e13364bafe": "from flashinfer 0.6.16",
        "ecf4298a2ba727cfedc8f769acc8fb346351883c71ede829b23a2e4e12f242f6": "from flashinfer 0.7.0.post1",
        "1cb2e033be903971fe06f004958cee2e1a0c6c5529a8ca0ed57e75d39e607f67": "from flashinfer 0.7.2.post1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper._plan_impl": {
        "47aba3baa4fe64e98fdc5644abc4541371c810ffa7c7f1a9718176df0563d527": "from flashinfer 0.6.16",
        "0784890d12613ce8df3b37cbbdde59e9b70f1f807cb5bbecf1774321a44ce1c1": "from flashinfer 0.7.0.post1",
        "11c35094022c776cfa0643deac69e03ace2b40fd95e0a9277993e477be822556": "from flashinfer 0.7.2.post1",
    },
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.run": {
        "d9e24d2ad1c1ebbe31c7399babc7708d6b79779635a99ebde0bd7ef58ffe0df0": "from flashinfer 0.6.16",
        "e1d6e464095406a61111b210266b47f6d4ddd6863693ddf4db373fff6a5466c4": "from flashinfer 0.6.18",
        "db411070f62de5f39988eacd24b45d76f5f52032feea9af6d4ca56bf09b729a3": "from flashinfer 0.7.0.post1",
        "28230dda4c97195a5a50512872e2da04374decb4f6c10106aa92414b135a8902": "from flashinfer 0.7.2.post1",
    },
    "flashinfer.decode:fast_decode_plan": {
        "d49cc126d6b6040eec373798860a3753129924b4ddcb0a14ddb96db71331a10d": "from flashinfer 0.6.16",
        "3b65a423ddf8b1d75f5931668eb2ec26cab67c9c90fdb4826e19c3a5feebd59f": "from flashinfer 0.7.0.post1",
        "5b93eaf472645caab8180b3461fce2974467abf4fe4fe306b8a1b2f41574e0bb": "from flashinfer 0.7.2.post1",
    },
}
