"""onnxruntime: its MultiHeadAttention and its GroupQueryAttention with keys and values in a buffer of its own, as one-node models."""


def forms(case):
    rules = {rule["rule"]: rule for rule in case["rules"]}
    refuse(
        case, ("bias", "dropout", "additive", "top", "unknown"), ("f32",),
        this_mask=set(rules) - {"causal", "window"} or ("window" in rules and "causal" not in rules),
        this_shape=case["cached"] == "shared" or case["dim"] != case["v_dim"] or (case["queries"] > 1 and case["queries"] != case["keys"]),
    )
    batch, heads, kv, n, m, dim = (case[name] for name in ("batch", "heads", "kv_heads", "queries", "keys", "dim"))
    draw = np.random.default_rng(1)
    q = draw.standard_normal((batch, n, heads * dim), dtype=np.float32) * np.float32(case["q_scale"])
    k, v = (draw.standard_normal((batch, m, kv * dim), dtype=np.float32) for _ in range(2))
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads, settings.log_severity_level = case["threads"], 1, 3
    settings.add_session_config_entry("session.set_denormal_as_zero", "1")  # as ours
    plain = not case["softcap"] and not case["sinks"]
    # A decoded query sees all keys, with a causal mask or without.
    causal = "causal" in rules and n > 1

    def bound(op, inputs, outputs, **attributes):
        """A call of the node, on buffers bound once. `inputs` and `outputs` are (name, array)."""
        kinds = {np.dtype(np.float32): helper.TensorProto.FLOAT, np.dtype(np.int32): helper.TensorProto.INT32}
        told = lambda pairs: [helper.make_tensor_value_info(name, kinds[x.dtype], x.shape) for name, x in pairs if x is not None]
        node = helper.make_node(op, [name if x is not None else "" for name, x in inputs], [name for name, _ in outputs], domain="com.microsoft", **attributes)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "attention", told(inputs), told(outputs))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
        session = ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        for name, x in inputs:
            if x is not None:
                binding.bind_input(name, "cpu", 0, x.dtype, x.shape, x.ctypes.data)
        for name, x in outputs:
            binding.bind_output(name, "cpu", 0, x.dtype, x.shape, x.ctypes.data)
        held = (inputs, outputs)

        def call():
            session.run_with_iobinding(binding)
            return held[1][0][1]

        return call

    found, out = {}, lambda: np.empty((batch, n, heads * dim), np.float32)
    if plain and kv == heads and "window" not in rules:
        inputs = [("q", q), ("k", k), ("v", v)]
        found["MultiHeadAttention"] = bound("MultiHeadAttention", inputs, [("out", out())], num_heads=heads, unidirectional=int(causal))
    if causal or n == 1:
        past = [x.reshape(batch, m, kv, dim).transpose(0, 2, 1, 3).copy() for x in (k, v)]
        sinks = [(name, None) for name in ("cos", "sin", "pos", "bias")] + [("sinks", draw.standard_normal(heads).astype(np.float32))]
        inputs = [
            ("q", q), ("k", k[:, m - n :].copy()), ("v", v[:, m - n :].copy()), ("past_k", past[0]), ("past_v", past[1]),
            ("lengths", np.full(batch, m - 1, np.int32)), ("total", np.array([m], np.int32)), *(sinks if case["sinks"] else []),
        ]
        window = {"local_window_size": rules["window"]["keys"]} if "window" in rules else {}
        cap = {"softcap": float(case["softcap"])} if case["softcap"] else {}
        outputs = [("out", out()), ("new_k", past[0]), ("new_v", past[1])]
        found["GroupQueryAttention"] = bound("GroupQueryAttention", inputs, outputs, num_heads=heads, kv_num_heads=kv, do_rotary=0, **window, **cap)
    return found


def start():
    global np, ort, helper
    import numpy as np
    import onnxruntime as ort
    from onnx import helper

    return f"onnxruntime {ort.__version__}", forms, lambda out: out.copy()


serve(start)
