"""OpenVINO's scaled_dot_product_attention, compiled for these shapes and for any."""


def forms(case):
    causal = bool(case["rules"])
    refuse(
        case, ("bias", "softcap", "sinks", "dropout", "additive", "top", "unknown"), ("f32", "bf16"),
        this_mask=any(rule["rule"] != "causal" for rule in case["rules"]) or (causal and case["queries"] != case["keys"]),
        this_cache_or_layout=case["cached"] == "shared" or case["layout"] != "bhsd",
    )
    batch, heads, kv, dim = case["batch"], case["heads"], case["kv_heads"], case["dim"]
    kind = ov.Type.f32 if case["dtype"] == "f32" else ov.Type.bf16
    draw = np.random.default_rng(1)

    def numbers(heads, length, dim):
        return draw.standard_normal((batch, heads, length, dim), dtype=np.float32)

    def tensor(numbers):
        if kind == ov.Type.f32:
            return ov.Tensor(numbers, shared_memory=False)
        tensor = ov.Tensor(kind, list(numbers.shape))
        bits = (numbers.view(np.uint32) + 0x8000) >> 16  # rounds, ties away
        tensor.data.view(np.uint16).reshape(numbers.shape)[...] = bits.astype(np.uint16)
        return tensor

    queries = numbers(heads, case["queries"], dim)
    tensors = [tensor(queries), tensor(numbers(kv, case["keys"], dim)), tensor(numbers(kv, case["keys"], case["v_dim"]))]

    def repeated(one, heads, dim):
        """The graph that exporters write for grouped heads."""
        if kv == heads:
            return one
        at = lambda i: op.gather(op.shape_of(one), op.constant([i], ov.Type.i64), op.constant(0, ov.Type.i64))
        shape = [at(0), op.constant([kv], ov.Type.i64), op.constant([heads // kv], ov.Type.i64), at(2), op.constant([dim], ov.Type.i64)]
        wide = op.broadcast(op.unsqueeze(one, op.constant(2, ov.Type.i64)), op.concat(shape, 0), broadcast_spec="BIDIRECTIONAL")
        return op.reshape(wide, op.constant([0, heads, -1, dim], ov.Type.i64), True)

    def compiled(known, tensors=tensors):
        axes = [list(one.shape) if known else [-1, one.shape[1], -1, one.shape[3]] for one in tensors]
        q, k, v = (op.parameter(ov.PartialShape(shape), kind) for shape in axes)
        rows = axes[0][1]
        node = op.scaled_dot_product_attention(q, repeated(k, rows, dim), repeated(v, rows, case["v_dim"]), causal=causal)
        settings = {
            "INFERENCE_PRECISION_HINT": case["dtype"], "INFERENCE_NUM_THREADS": case["threads"], "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False,
        }
        request = ov.Core().compile_model(ov.Model([node], [q, k, v], "attention"), "CPU", settings).create_infer_request()
        for i, one in enumerate(tensors):
            request.set_input_tensor(i, one)

        def call():
            request.infer()
            return Output(request.get_output_tensor(0))

        return call

    found = {"static": compiled(True), "dynamic": compiled(False)}
    if kv != heads and case["queries"] == 1:
        # The query heads of a key head are rows over the same keys.
        found["folded"] = compiled(True, [tensor(queries.reshape(batch, kv, heads // kv, dim)), *tensors[1:]])
    return found


class Output:
    """Memory of the request, which it writes again: nothing is returned anew."""

    nbytes = 0

    def __init__(self, tensor):
        self.tensor = tensor


def read(output):
    tensor = output.tensor
    if tensor.element_type == ov.Type.bf16:
        bits = np.array(tensor.data).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tuple(tensor.shape))
    return np.array(tensor.data, dtype=np.float32)


def start():
    global np, ov, op
    import numpy as np
    import openvino as ov
    from openvino import opset13 as op

    return f"openvino {ov.__version__.split('-')[0]}", forms, read


serve(start)
