"""NNEF models with the operators of tract: read, written and run here, and the same by the engine itself."""

import io
import tarfile

import numpy as np
import pytest

tract = pytest.importorskip("tract", reason="the peer engine (package tract) is not installed")
pytest.importorskip("nnef", reason="nnef is not installed")

from kvnumba.graph import nnef  # noqa: E402

pytestmark = pytest.mark.onnx

H_Q, H_KV, D, HIDDEN = 4, 2, 8, 12
STEPS = (5, 1, 1, 40, 1, 3)

HEAD = """version 1.0;

extension tract_registry tract_core;
extension tract_registry tract_transformers;
extension tract_symbol S;
extension tract_symbol P;

graph network({inputs}) -> (o)
{{
"""
SHAPES = f"past_sequence_shape=[1,{H_KV},P,{D}], input_sequence_shape=[1,{H_KV},S,{D}]"


def external(name, heads):
    return f"    {name} = tract_core_external(shape=[1,{heads},S,{D}], datum_type='f32');\n"


def cache(out, into, bits=0, per_channel=0):
    kind = "quantized_dyn_kv_cache" if bits else "dyn_kv_cache"
    codes = f"bits={bits}, per_channel={per_channel}, " if bits else ""
    return f"    {out} = tract_transformers_{kind}({into}, name='{out}', axis=2, {codes}datum_type='f32', {SHAPES});\n"


def attention(bits=0, causal="true", more="", inputs="q, k, v"):
    text = HEAD.format(inputs=inputs) + external("q", H_Q) + external("k", H_KV) + external("v", H_KV)
    if "mask" in inputs:
        text += "    mask = tract_core_external(shape=[1,1,S,P], datum_type='f32');\n"
    text += cache("kc", "k", bits, 1) + cache("vc", "v", bits, 0)
    return text + (
        f"    o = tract_transformers_sdpa(q, kc, vc{more}, datum_type='f32', acc_datum_type='f32', "
        f"is_causal={causal});\n}}\n"
    )


def engine(path):
    return tract.nnef().with_tract_transformers().load(str(path)).into_runnable().spawn_state()


def calls(seed=0):
    rng = np.random.default_rng(seed)
    for new in STEPS:
        yield {name: rng.standard_normal((1, h, new, D), dtype=np.float32) for name, h in zip("qkv", (H_Q, H_KV, H_KV))}


@pytest.mark.parametrize("archive", ["model", "model.tar", "model.tgz"])
@pytest.mark.parametrize("causal", ["true", "false"])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_model_written_here_runs_in_the_engine_with_the_same_outputs(bits, causal, archive, tmp_path):
    model = nnef.parse(attention(bits, causal))
    nnef.save(model, tmp_path / archive)
    assert nnef.load(tmp_path / archive) == model
    peer, session = engine(tmp_path / archive), nnef.Session(model)
    for call in calls():
        expected = peer.run(list(call.values()))[0].to_numpy()
        np.testing.assert_allclose(session.run(call)["o"], expected, rtol=0, atol=2e-6)
    assert session.length == sum(STEPS)


@pytest.mark.parametrize("per_channel", [0, 1])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_outputs_agree_to_float32_rounding(bits, per_channel, tmp_path):
    text = HEAD.format(inputs="x") + external("x", H_KV) + cache("o", "x", bits, per_channel) + "}\n"
    model = nnef.parse(text)
    nnef.save(model, tmp_path / "model")
    peer, session = engine(tmp_path / "model"), nnef.Session(model)
    for call in calls():
        expected = peer.run([call["k"]])[0].to_numpy()
        got = session.run({"x": call["k"]})["o"]
        assert np.abs(got - expected).max() <= np.spacing(np.abs(expected).max())


@pytest.mark.parametrize("bits", [0, 8])
def test_a_model_dumped_by_the_engine_is_read_here(bits, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "graph.nnef").write_text(attention(bits, more=", scale=0.3"))
    framework = tract.nnef().with_tract_transformers()
    dumped = framework.load(str(tmp_path / "first"))
    framework.write_model_to_dir(dumped, str(tmp_path / "dump"))
    framework.write_model_to_tar_gz(dumped, str(tmp_path / "dump.tgz"))
    model = nnef.load(tmp_path / "dump")
    assert nnef.load(tmp_path / "dump.tgz") == model
    assert [one.kind for one in model.operations][-1] == "tract_transformers_sdpa"
    assert sorted(model.extensions) == ["tract_symbol P", "tract_symbol S"]
    peer, session = engine(tmp_path / "dump"), nnef.Session(model)
    for call in calls():
        expected = peer.run(list(call.values()))[0].to_numpy()
        np.testing.assert_allclose(session.run(call)["o"], expected, rtol=0, atol=2e-6)


def layer():
    """A whole layer: products with variables, heads, caches, attention, heads together again."""
    text = HEAD.format(inputs="x") + f"    x = tract_core_external(shape=[1,S,{HIDDEN}], datum_type='f32');\n"
    tensors, rng = {}, np.random.default_rng(5)
    for name, heads in (("q", H_Q), ("k", H_KV), ("v", H_KV)):
        tensors[f"w{name}"] = rng.standard_normal((1, HIDDEN, heads * D)).astype(np.float32)
        text += f"    w{name} = variable<scalar>(shape=[1,{HIDDEN},{heads * D}], label='w{name}');\n"
        text += f"    {name}1 = matmul(x, w{name});\n"
        text += f"    {name}2 = reshape({name}1, shape=[{heads},{D}], axis_start=2, axis_count=1);\n"
        text += f"    {name} = transpose({name}2, axes=[0,2,1,3]);\n"
    text += cache("kc", "k", 8, 1) + cache("vc", "v", 8, 0)
    text += "    a = tract_transformers_sdpa(q, kc, vc, datum_type='f32', acc_datum_type='f32', is_causal=true);\n"
    text += "    b = mul(a, 2.0);\n    o = add(b, q);\n}\n"
    model = nnef.parse(text)
    model.tensors = tensors
    return model


@pytest.mark.parametrize("archive", ["model", "model.tgz"])
def test_variables_and_the_operators_of_a_layer(archive, tmp_path):
    model = layer()
    nnef.save(model, tmp_path / archive)
    loaded = nnef.load(tmp_path / archive)
    assert set(loaded.tensors) == {"wq", "wk", "wv"}
    assert all(np.array_equal(loaded.tensors[name], model.tensors[name]) for name in model.tensors)
    peer, session = engine(tmp_path / archive), nnef.Session(loaded)
    rng = np.random.default_rng(1)
    for new in STEPS:
        x = rng.standard_normal((1, new, HIDDEN), dtype=np.float32)
        expected = peer.run([x])[0].to_numpy()
        np.testing.assert_allclose(session.run({"x": x})["o"], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [0, 8])
def test_the_state_can_be_cut_frozen_and_reset(bits):
    session = nnef.Session(nnef.parse(attention(bits)))
    first, *rest = calls()
    session.run(first)
    snapshot, size = session.freeze(), session.nbytes
    expected = [session.run(call)["o"].tobytes() for call in rest[:2]]
    session.truncate(5)
    assert (session.length, session.nbytes) == (5, size)
    assert [session.run(call)["o"].tobytes() for call in rest[:2]] == expected
    session.unfreeze(snapshot)
    assert [session.run(call)["o"].tobytes() for call in rest[:2]] == expected
    session.reset()
    assert session.length == 0


def test_facts_and_cost_of_each_cache():
    model = nnef.parse(attention(8))
    assert nnef.output_facts(model)["kc"] == ("f32", ["1", str(H_KV), "P+S", str(D)])
    plain = nnef.cost(nnef.parse(attention()))
    assert plain["kc"] == {"values_per_token": 16.0, "bytes_per_token": 64.0}
    # One byte a value; keys: 8 bytes of parameters for each channel of 32 tokens; values: 8 bytes for each token.
    costs = nnef.cost(model)
    assert costs["kc"]["bytes_per_token"] == 16 + H_KV * D * 8 / 32
    assert costs["vc"]["bytes_per_token"] == 16 + H_KV * 8


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tract_transformers_sdpa(q", "tract_transformers_nothing(q", "must be a graph of known operators"),
        ("is_causal=true", "is_causal=true, colour='red'", "must be a graph of known operators"),
        ("    o = tract_transformers_sdpa(q, kc, vc, datum_type='f32', acc_datum_type='f32', is_causal=true);",
         "    o = sqr(q);", r"operator sqr of 'o' must be one of add, concat"),
        ("graph network", "graph", "must be a graph of known operators"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named(old, new, words):
    text = attention()
    assert old in text
    with pytest.raises(ValueError, match=words):
        nnef.parse(text.replace(old, new))


def test_wrong_calls_change_nothing():
    session = nnef.Session(nnef.parse(attention(8)))
    first, second, *_ = calls()
    session.run(first)
    with pytest.raises(ValueError, match=r"feeds must have the inputs \['k', 'q', 'v'\], got \['k'\]"):
        session.run({"k": 1})
    with pytest.raises(ValueError, match=r"k must have shape \[1, 2, S, 8\], got \[1, 3, 1, 8\]"):
        session.run({**second, "k": np.zeros((1, 3, 1, D))})
    bad = {**second, "v": np.full_like(second["v"], np.nan)}
    with pytest.raises(ValueError, match=r"operator tract_transformers_quantized_dyn_kv_cache of 'vc': .*finite"):
        session.run(bad)
    assert {state.length() for state in session._states.by_name.values()} == {5}
    with pytest.raises(ValueError, match="must have bits 4 or 8 and axis 2, got bits 3 and axis 2"):
        nnef.Session(nnef.parse(attention(3)))
    other = HEAD.format(inputs="x") + external("x", H_KV) + cache("o", "x") + "}\n"
    with pytest.raises(ValueError, match="snapshot must come from a session of the same model"):
        nnef.Session(nnef.parse(other)).unfreeze(session.freeze())


def packed(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_damaged_and_hostile_archives_are_refused(tmp_path):
    nnef.save(layer(), tmp_path / "good.tar")
    good = (tmp_path / "good.tar").read_bytes()
    for cut in (0, 100, len(good) // 3):
        (tmp_path / "bad.tar").write_bytes(good[:cut])
        with pytest.raises(ValueError, match="must"):
            nnef.load(tmp_path / "bad.tar")
    graph = nnef.text(layer()).encode()
    packed(tmp_path / "bad.tar", {"../outside.nnef": b"x", "graph.nnef": graph})
    with pytest.raises(ValueError, match=r"must hold graph.nnef and .dat files only, got '../outside.nnef'"):
        nnef.load(tmp_path / "bad.tar")
    assert not (tmp_path.parent / "outside.nnef").exists()
    packed(tmp_path / "bad.tar", {"graph.nnef": graph})
    with pytest.raises(ValueError, match=r"variable 'wq' must have the file wq.dat, got none"):
        nnef.load(tmp_path / "bad.tar")
    packed(tmp_path / "bad.tar", {"graph.nnef": graph, "wq.dat": bytes(200)})
    with pytest.raises(ValueError, match=r"wq.dat must have 1664 bytes"):
        nnef.load(tmp_path / "bad.tar")
    packed(tmp_path / "bad.tar", {"graph.nnef": graph, "wq.dat": bytes(1664)})
    with pytest.raises(ValueError, match=r"wq.dat must be a tensor of NNEF"):
        nnef.load(tmp_path / "bad.tar")
    huge = graph.replace(f"[1, {HIDDEN}, {H_Q * D}]".encode(), b"[65535, 65535, 65535]", 1)
    packed(tmp_path / "bad.tar", {"graph.nnef": huge, "wq.dat": bytes(1664)})
    with pytest.raises(ValueError, match=r"wq.dat must have \d+ bytes, a header and float32"):
        nnef.load(tmp_path / "bad.tar")
    packed(tmp_path / "bad.tar", {"graph.nnef": graph.replace(b"label = 'wq'", b"label = '../wq'")})
    with pytest.raises(ValueError, match=r"label of variable 'wq' must be a plain name, got '../wq'"):
        nnef.load(tmp_path / "bad.tar")
    packed(tmp_path / "bad.tar", {"wq.dat": b"x"})
    with pytest.raises(ValueError, match=r"must hold graph.nnef, got none"):
        nnef.load(tmp_path / "bad.tar")
    with pytest.raises(FileNotFoundError):
        nnef.load(tmp_path / "nowhere.tar")


def graph(body, inputs, outputs="o"):
    return HEAD.format(inputs=inputs).replace("-> (o)", f"-> ({outputs})") + body + "}\n"


def both(text, folder, tensors=None):
    """The engine and a session of one model."""
    model = nnef.parse(text)
    model.tensors = tensors or {}
    nnef.save(model, folder / "model")
    return engine(folder / "model"), nnef.Session(nnef.load(folder / "model"))


TYPES = {
    "bool": bool, "f16": "f2", "f32": "f4", "f64": "f8", "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8",
    "u8": "u1", "u16": "u2", "u32": "u4", "u64": "u8",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*TYPES, "F32"])
def test_inputs_and_plain_caches_keep_their_element_type_bit_for_bit(kind, tmp_path):
    dtype = np.dtype(TYPES[kind.lower()])
    text = graph(external("x", H_KV) + cache("o", "x"), "x").replace("'f32'", f"'{kind}'")
    peer, session = both(text, tmp_path)
    rng = np.random.default_rng(2)
    for new in (2, 1, 3):
        x = rng.integers(0, 256, (1, H_KV, new, D * dtype.itemsize), np.uint8).view(dtype)
        x = rng.random(x.shape) < 0.5 if kind == "bool" else np.nan_to_num(x) if dtype.kind == "f" else x
        expected, got = peer.run([x])[0].to_numpy(), session.run({"x": x})["o"]
        assert got.dtype == expected.dtype == dtype
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["bf16", "tdim", "nonsense"])
def test_other_element_types_are_refused(kind):
    for name in ("k", "kc", "o"):  # an input, a cache, attention
        lines = attention().splitlines()
        i = next(i for i, line in enumerate(lines) if line.startswith(f"    {name} = "))
        lines[i] = lines[i].replace("datum_type='f32'", f"datum_type='{kind}'")
        with pytest.raises(ValueError, match=rf"datum_type of '{name}' must be one of bool, f16, .*, got '{kind}'"):
            nnef.parse("\n".join(lines))
    model = nnef.parse(attention())
    model.caches[0].attributes["datum_type"] = kind
    for function in (nnef.cost, nnef.output_facts, nnef.text, nnef.Session):
        with pytest.raises(ValueError, match="datum_type of 'kc' must be one of"):
            function(model)


def test_integers_are_given_as_integers():
    text = graph(external("x", H_KV).replace("f32", "u8") + "    o = copy(x);\n", "x")
    session = nnef.Session(nnef.parse(text))
    for bad in (0.5, 256, -1):
        with pytest.raises(ValueError, match="x must hold values of u8, got others in an array of"):
            session.run({"x": np.full((1, H_KV, 1, D), bad)})
    assert session.run({"x": np.full((1, H_KV, 1, D), 255.0)})["o"].dtype == np.uint8


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        ("external(shape=[1,S])", "f32"),
        ("external<scalar>(shape=[1,S])", "f32"),
        ("external<integer>(shape=[1,S])", "i64"),
        ("external<logical>(shape=[1,S])", "bool"),
        ("tract_core_external(datum_type='i32', shape=[1,S])", "i32"),
        ('tract_core_external( shape = [1, S] , datum_type = "F16" )', "f16"),
        ("# external<integer>(shape=[9]);\n tract_core_external(shape=[1,S], datum_type='i8')", "i8"),
    ],
)  # fmt: skip
def test_each_input_has_its_own_element_type(declared, kind):
    text = graph(
        f"    # a = tract_core_external(shape=[9], datum_type='i64'); it's\n    a = external<scalar>(shape=[2]);\n"
        f"    x = {declared};\n    b = tract_core_external(shape=[3], datum_type='f64');\n    o = copy(x);\n",
        "a, x, b",
    )
    wanted = [nnef.Input("a", "f32", [2]), nnef.Input("x", kind, [1, "S"]), nnef.Input("b", "f64", [3])]
    assert nnef.parse(text).inputs == wanted


@pytest.mark.parametrize("shape", ["1,2,-1", "-1", "0,0,-1", "1,-1,8", "1,2,P+S,8", "1,(P+S)*2,8", "1,2,8*P+8*S"])
def test_shapes_of_a_reshape_are_inferred_and_counted_as_in_the_engine(shape, tmp_path):
    text = graph(external("x", H_KV) + cache("c", "x") + f"    o = reshape(c, shape=[{shape}]);\n", "x")
    peer, session = both(text, tmp_path)
    for call in calls():
        np.testing.assert_array_equal(session.run({"x": call["k"]})["o"], peer.run([call["k"]])[0].to_numpy())


def test_a_symbol_that_is_not_known_by_one_number_is_named():
    text = graph(external("x", H_KV) + external("y", H_KV) + "    o = reshape(x, shape=[{}]);\n", "x, y")
    x = np.zeros((1, H_KV, 3, D), np.float32)
    for shape, words in (
        ("S,-1", r"symbol S .*, got \[2, 3\]"),
        ("Q,-1", "symbol Q .*, got none"),
        ("S%2", "dimension"),
    ):
        with pytest.raises(ValueError, match=f"operator reshape of 'o': {words}"):
            nnef.Session(nnef.parse(text.replace("{}", shape))).run({"x": x, "y": x[:, :, 1:]})


def test_what_the_engine_writes_for_a_copy_is_read(tmp_path):
    text = graph(external("x", H_KV) + "    y = reshape(x, shape=[1,2,-1]);\n    o = copy(y);\n", "x")
    both(text, tmp_path)
    framework = tract.nnef().with_tract_transformers()
    framework.write_model_to_dir(framework.load(str(tmp_path / "model")), str(tmp_path / "dump"))
    assert "o = y" in (tmp_path / "dump" / "graph.nnef").read_text()
    x = np.ones((1, H_KV, 3, D), np.float32)
    assert nnef.Session(nnef.load(tmp_path / "dump")).run({"x": x})["o"].shape == (1, H_KV, 3 * D)


@pytest.mark.parametrize(
    "operation", ["mul(x, 0.5)", "mul(2.0, x)", "add(x, 3.0)", "div(x, 2.0)", "div(x, y)", "sub(y, x)"]
)
@pytest.mark.parametrize("kind", ["f16", "f32", "i32", "i64"])
def test_arithmetic_is_done_in_the_element_type(kind, operation, tmp_path):
    declared = "".join(f"    {name} = tract_core_external(shape=[S], datum_type='{kind}');\n" for name in "xy")
    peer, session = both(graph(declared + f"    o = {operation};\n", "x, y"), tmp_path)
    large = 2**60 + 1 if kind == "i64" else 1000
    x = np.array([7, -7, 5, -1, large], TYPES[kind])
    y = np.array([2, 2, -2, 3, 3], TYPES[kind])
    expected, got = peer.run([x, y])[0].to_numpy(), session.run({"x": x, "y": y})["o"]
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_integers_and_floats_are_not_mixed():
    body = "    x = external<integer>(shape=[S]);\n    y = external(shape=[S]);\n    o = mul(x, y);\n"
    with pytest.raises(ValueError, match=r"operator mul of 'o': x and y must have one .* got int64 and float32"):
        nnef.Session(nnef.parse(graph(body, "x, y"))).run({"x": [1], "y": [0.5]})


def test_two_caches_of_one_name_are_two_states(tmp_path):
    body = external("x", H_KV) + external("y", H_KV) + cache("a", "x") + cache("b", "y").replace("name='b'", "name='a'")
    peer, session = both(graph(body, "x, y", "a, b"), tmp_path)
    for call in calls():
        got = session.run({"x": call["k"], "y": call["v"]})
        for name, expected in zip("ab", peer.run([call["k"], call["v"]])):
            np.testing.assert_array_equal(got[name], expected.to_numpy())
    model = nnef.parse(graph(body, "x, y", "a, b"))
    assert list(nnef.cost(model)) == list(nnef.output_facts(model)) == ["a of a", "a of b"]


def test_a_refused_truncate_leaves_all_caches():
    body = external("x", H_KV) + external("y", H_KV) + cache("a", "x") + cache("b", "y")
    session = nnef.Session(nnef.parse(graph(body, "x, y", "a, b")))
    x = np.zeros((1, H_KV, 5, D), np.float32)
    session.run({"x": x, "y": x[:, :, :3]})
    for n in (4, -1):
        with pytest.raises(ValueError, match=f"n must be from 0 to the length 3, got {n}"):
            session.truncate(n)
    assert [state.length() for state in session._states.by_name.values()] == [5, 3]
    session.truncate(2)
    assert [state.length() for state in session._states.by_name.values()] == [2, 2]


def labelled(label):
    variable = "    w = variable<scalar>(label='w', shape=[1,2,1,8]);\n    o = mul(x, w);\n"
    model = nnef.parse(graph(external("x", H_KV) + variable, "x"))
    model.operations[0].attributes["label"] = label
    model.tensors[label] = np.full((1, H_KV, 1, D), 3, np.float32)
    return model


@pytest.mark.parametrize("archive", ["model", "model.tar", "model.tgz"])
@pytest.mark.parametrize("label", ["w", "a/w", "a/b/w", "a b", "é", "it's", "w.dat"])
def test_a_label_may_be_that_of_a_file_in_a_folder(label, archive, tmp_path):
    nnef.save(labelled(label), tmp_path / archive)
    nnef.save(labelled(label), tmp_path / archive)  # over what is there
    loaded, x = nnef.load(tmp_path / archive), np.ones((1, H_KV, 2, D), np.float32)
    assert list(loaded.tensors) == [label]
    assert (nnef.Session(loaded).run({"x": x})["o"] == 3).all()
    assert (engine(tmp_path / archive).run([x])[0].to_numpy() == 3).all()
    assert [path.name for path in tmp_path.iterdir()] == [archive]


@pytest.mark.parametrize("archive", ["model", "model.tar"])
@pytest.mark.parametrize(
    "label",
    ["../evil", "/evil", "a/../../evil", "a/..", ".hidden", "./w", "a//w", "a/", "", "..\\evil", "C:evil", "a\0b"],
)
def test_other_labels_are_refused_and_nothing_is_written(label, archive, tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(ValueError, match=r"label of variable 'w' must be .*, got "):
        nnef.save(labelled(label), tmp_path / "here" / archive)
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_failed_save_names_the_path_that_was_given(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        nnef.save(labelled("w"), tmp_path / "missing" / "model.tar")
    assert caught.value.filename == str(tmp_path / "missing" / "model.tar")


def test_a_variable_without_its_tensor_is_named(tmp_path):
    model = labelled("w")
    x = np.ones((1, H_KV, 2, D), np.float32)
    for tensors, words in (
        ({}, "tensors of the model must have 'w'"),
        ({"w": np.ones(3)}, "tensor 'w' must have shape"),
    ):
        model.tensors = tensors
        with pytest.raises(ValueError, match=f"operator variable of 'w': {words}"):
            nnef.Session(model).run({"x": x})
        with pytest.raises(ValueError, match=words):
            nnef.save(model, tmp_path / "model")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["it's", 'say "hi"', "a\\", "\\'", "shape = [Q]", "", "é", "# no", "a;b", "extension tract_symbol Z;",
             "x\ny", "o = tract_core_external(shape=[1], datum_type='i64')", "word_0", "}\n}"],
)  # fmt: skip
def test_any_text_can_be_a_name(name, tmp_path):
    model = nnef.parse(graph(external("x", H_KV) + cache("o", "x"), "x"))
    model.operations[0].attributes["name"] = name
    assert nnef.parse(nnef.text(model)) == model
    model.inputs[0].name = model.operations[0].inputs["input"] = name or "x"
    assert nnef.parse(nnef.text(model)) == model
    nnef.save(model, tmp_path / "model")
    x = np.ones((1, H_KV, 2, D), np.float32)
    assert (engine(tmp_path / "model").run([x])[0].to_numpy() == 1).all()
    assert nnef.Session(model).run({name or "x": x})["o"].shape == x.shape


def test_comments_and_escaped_names_are_read():
    text = graph(
        "    # extension tract_symbol Z; it's\n"
        + external('i"x.0"', H_KV)
        + cache("o", 'i"x.0"').replace("name='o'", 'name="it\'s"'),
        'i"x.0"',
    )
    model = nnef.parse(text)
    assert model.extensions == ["tract_symbol S", "tract_symbol P"]
    assert (model.inputs[0].name, model.caches[0].attributes["name"]) == ("x.0", "it's")


@pytest.mark.parametrize(("old", "new"), [("axis=2", "axis=4"), ("axis=2", "axis=-1"), ("=[1,2,P,8]", "=[1,2,P]")])
def test_an_axis_that_is_none_is_refused(old, new):
    text = attention().replace(old, new)
    with pytest.raises(ValueError, match="of 'kc' must have two shapes of one rank and an axis of it, got"):
        nnef.parse(text)


def test_names_that_nothing_gives_are_refused():
    for change in (lambda model: model.operations[0].inputs.update(input="z"), lambda model: model.outputs.append("z")):
        model = nnef.parse(attention())
        change(model)
        with pytest.raises(ValueError, match="must be inputs of the model or results of operators before, got 'z'"):
            nnef.Session(model)


@pytest.mark.parametrize("other", [0, 4])
def test_a_snapshot_of_another_session_is_refused(other):
    session = nnef.Session(nnef.parse(attention(8)))
    for snapshot in (nnef.Session(nnef.parse(attention(other))).freeze(), "x", None):
        with pytest.raises(ValueError, match="snapshot must come from a session of the same model, got another one"):
            session.unfreeze(snapshot)
    with pytest.raises(TypeError, match="feeds must be a mapping of inputs to arrays, got None"):
        session.run(None)
