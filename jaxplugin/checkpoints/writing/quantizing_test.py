# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are written in their layout, or not at all."""

import contextlib
import json
import pathlib
import resource
import shutil
import signal
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

import jaxplugin as jp
from jaxplugin.checkpoints import safetensors_files
from jaxplugin.checkpoints.writing import staging
from jaxplugin.testing import checkpoint_files as files
from jaxplugin.testing import command_lines, contract

D = 64
ERROR = jp.checkpoints.CheckpointError
BASE = "model.layers.0"


def normal(*shape, seed=0, dtype=ml_dtypes.bfloat16):
  x = np.random.default_rng([seed, *shape]).standard_normal(shape)
  return (x / 50).astype(dtype)


def model():
  """Returns the tensors of a model in two files."""
  attention = {
    f"{BASE}.self_attn.{x}_proj.weight": normal(D, D, seed=ord(x)) * (i + 1)
    for i, x in enumerate("qkvo")
  }
  return (
    {
      "model.embed_tokens.weight": normal(10, D),
      **attention,
      f"{BASE}.input_layernorm.weight": normal(D),
      f"{BASE}.self_attn.q_norm.weight": normal(2, D),
      f"{BASE}.mlp.gate.weight": normal(3, D),
    },
    {
      f"{BASE}.mlp.gate_proj.weight": normal(2 * D, D, dtype=np.float32),
      f"{BASE}.mlp.up_proj.weight": normal(2 * D, D, dtype=np.float16),
      f"{BASE}.mlp.down_proj.weight": normal(D, 2 * D),
      f"{BASE}.mlp.short.weight": normal(D, 40),
      f"{BASE}.self_attn.q_proj.bias": normal(2, D),
      "position_ids": np.arange(3),
      "lm_head.weight": normal(10, D),
    },
  )


WEIGHTS = [
  *(f"{BASE}.self_attn.{x}_proj.weight" for x in "qkvo"),
  *(f"{BASE}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
]


class Case(files.CheckpointTestCase):
  def folder(self, config=None, shards=None):
    """Returns a checkpoint in Hugging Face's form."""
    folder = self.empty() / "in"
    folder.mkdir()
    names = {}
    for i, tensors in enumerate(shards or model()):
      path = folder / f"model-{i}.safetensors"
      self.file(tensors, {"format": "pt"}, path)
      names |= dict.fromkeys(tensors, path.name)
    (folder / "model.safetensors.index.json").write_text(
      json.dumps({"metadata": {"total_size": 1}, "weight_map": names})
    )
    (folder / "config.json").write_text(json.dumps({"a": 1, **(config or {})}))
    (folder / "tokenizer.json").write_text("words")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("once more")
    return folder

  def quantize(self, source, format="nvfp4", target=None, **options):
    name = "out.safetensors" if source.is_file() else "out"
    target = target or self.empty() / name
    return jp.checkpoints.quantize(source, target, format, **options)


@contextlib.contextmanager
def file_size_limit(size):
  """Makes writing more bytes to a file an error."""
  limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
  previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    signal.signal(signal.SIGXFSZ, previous)


def nearest_reciprocal(scale):
  """Returns the reciprocal of an f32 that is nearest to `scale`, by f64."""
  divisor = np.float32(1 / np.float64(scale))
  return np.float32(1 / np.float64(divisor))


class RoundTripTest(Case):
  @parameterized.product(
    layout=("modelopt", "compressed-tensors", "torchao"),
    format=("nvfp4", "mxfp8", "mxfp4"),
  )
  @pytest.mark.sample(8)
  def test_bits_are_those_of_quantize(self, layout, format):
    tensors = {n: x for file in model() for n, x in file.items()}
    done = self.quantize(self.folder(), format, layout=layout, verify=True)
    found = jp.checkpoints.load(done.path)
    self.assertCountEqual(found, tensors)
    own = {n: jp.quantize(tensors[n], format) for n in WEIGHTS}
    is_shared = format == "nvfp4" and layout != "torchao"
    for name in WEIGHTS:
      self.assertEqual(found.entries[name].layout, layout)
      group = [name]
      if is_shared:
        for kind in (("q_", "k_", "v_"), ("gate_", "up_")):
          if any(f".{x}proj" in name for x in kind):
            group = [n for n in WEIGHTS if any(f".{x}proj" in n for x in kind)]
      scale = None
      if format == "nvfp4":
        scale = max(np.asarray(own[n].global_scale).item() for n in group)
        if layout == "compressed-tensors":
          scale = nearest_reciprocal(np.float32(scale))
      wanted = jp.quantize(tensors[name], format, global_scale=scale)
      contract.assert_same_bits(found[name], wanted)
    for name in {*tensors} - {*WEIGHTS}:
      self.assertEqual(found[name].tobytes(), tensors[name].tobytes())
      self.assertEqual(found[name].dtype, tensors[name].dtype)
    self.assertCountEqual(done.errors, WEIGHTS)
    for name, error in done.errors.items():
      x = tensors[name].astype(np.float64)
      y = np.asarray(jp.dequantize(found[name], jnp.float32), np.float64)
      wanted = np.linalg.norm(x - y) / np.linalg.norm(x)
      np.testing.assert_allclose(error, wanted, rtol=1e-9)

  # saving_test.py quantizes the shape (64, 256) as well.
  @parameterized.parameters(
    ("deepseek", "fp8_128x128", 200, 300, "fp8"),
    ("compressed-tensors", "fp8_128x128", 200, 300, "float-quantized"),
    ("compressed-tensors", "fp8_row", 64, 256, "float-quantized"),
    ("compressed-tensors", "int8_row", 64, 256, "int-quantized"),
    ("compressed-tensors", "int4_128", 64, 256, "pack-quantized"),
    ("compressed-tensors", "int4_128_bf16", 64, 256, "pack-quantized"),
    ("compressed-tensors", "int4_32", 64, 256, "pack-quantized"),
    ("compressed-tensors", "uint4_128", 21, 256, "pack-quantized"),
    ("compressed-tensors", "uint4_128_bf16", 64, 256, "pack-quantized"),
  )
  def test_float_scales_are_those_of_quantize(self, layout, format, n, k, word):
    x = normal(n, k)
    source = self.folder({}, [{"a.weight": x, "b.weight": normal(n, 30)}])
    done = self.quantize(source, format, layout=layout, verify=True)
    found = jp.checkpoints.load(done.path)
    entry = found.entries["a.weight"]
    self.assertEqual((entry.layout, str(entry.format)), (layout, format))
    contract.assert_same_bits(found["a.weight"], jp.quantize(x, format))
    # Blocks of INT4 are whole, and other float scales allow a short block.
    is_left = "int4" in format
    self.assertEqual(found.entries["b.weight"].format is None, is_left)
    config = json.loads((done.path / "config.json").read_text())
    config = config["quantization_config"]
    self.assertIn(word, (config["quant_method"], config.get("format")))

  def test_experts(self):
    x = normal(2, 2 * D, D)  # [E, n, k]
    square = normal(2, D, D)
    scaled = (x * np.float32([1, 9])[:, None, None]).astype(np.float32)
    down, gpt_oss = "mlp.experts.down_proj", {"model_type": "gpt_oss"}
    turned = {"transposed": [down]}
    x_q, square_q = (jp.quantize(y, "mxfp4") for y in (x, square))
    for layout, name, stored, options, wanted in (
      ("gpt-oss", down, x.swapaxes(1, 2), turned, x_q),
      ("gpt-oss", "a.mlp1_weight", x, {}, x_q),
      # The model's type says that k comes first.
      ("gpt-oss", down, square.swapaxes(1, 2), {}, square_q),
      ("modelopt", down, x, turned, jp.quantize(x, "nvfp4", axis=1)),
      (
        *("torchao", "a.experts.up", scaled, {}),
        jp.quantize(scaled, "nvfp4", batch_dims=1),
      ),
    ):
      with self.subTest(layout, name=name, options=options):
        config = {} if options or name != down else gpt_oss
        source = self.folder(config, [{name: stored}])
        done = self.quantize(
          source, str(wanted.format), layout=layout, verify=True, **options
        )
        found = jp.checkpoints.load(done.path)
        contract.assert_same_bits(jax.tree.map(np.asarray, found[name]), wanted)
        y = np.asarray(jp.dequantize(wanted, jnp.float32), np.float64)
        if layout == "gpt-oss" and name == down:
          y = y.swapaxes(1, 2)
        norm = np.linalg.norm(y - stored.astype(float))
        norm /= np.linalg.norm(stored.astype(float))
        np.testing.assert_allclose(done.errors[name], norm, rtol=1e-9)

  def test_plain_tensors_may_look_quantized(self):
    x = normal(D, D, dtype=np.float32)
    dtypes = (np.int8, np.uint8, np.int32, ml_dtypes.float8_e4m3fn)
    plain = {
      name: np.arange(D * D).reshape(D, D).astype(dtype)
      for i, dtype in enumerate(dtypes)
      # The second is in the module of a quantized weight.
      for name in (f"table.{i}.weight", f"a.{i}.codes")
    }
    weights = {f"a.{i}.weight": x for i in range(len(dtypes))}
    for layout in ("modelopt", "compressed-tensors", "comfyui", "torchao"):
      for source in (
        self.file({**weights, **plain}),
        self.folder({}, [weights, plain]),
      ):
        with self.subTest(layout, source=source.name):
          done = self.quantize(source, "mxfp8", layout=layout, verify=True)
          self.assertCountEqual(done.errors, weights)
          found = jp.checkpoints.load(done.path)
          self.assertCountEqual(found, {**weights, **plain})
          for name, y in plain.items():
            self.assertEqual(found[name].dtype, y.dtype)
            self.assertEqual(found[name].tobytes(), y.tobytes())

  def test_zeros_and_numbers_that_are_none_come_back(self):
    x = normal(D, D, dtype=np.float32)
    x[3, 5], x[9, 40] = np.nan, np.inf
    tensors = {
      "a.q_proj.weight": np.zeros((D, D), np.float32),
      "a.k_proj.weight": x,
      "b.weight": np.zeros((D, D), np.float32),
    }
    for layout in ("modelopt", "compressed-tensors"):
      done = self.quantize(
        self.file(tensors), layout=layout, verify=True, allow_nonfinite=True
      )
      found = jp.checkpoints.load(done.path)
      # Zeros do not change a shared global scale.
      g = np.asarray(jp.quantize(x, "nvfp4").global_scale).item()
      if layout != "modelopt":
        g = nearest_reciprocal(np.float32(g))
      for name, x_ in tensors.items():
        scale = None if name == "b.weight" else g
        with warnings.catch_warnings():
          warnings.simplefilter("ignore", jp.checkpoints.NumbersWarning)
          got = found[name]
        contract.assert_same_bits(
          got, jp.quantize(x_, "nvfp4", global_scale=scale)
        )


class NonfiniteTest(Case):
  def tensors(self, number):
    bad = normal(D, D, dtype=ml_dtypes.bfloat16)
    bad[3, 5] = number
    return {"bad.weight": bad, "good.weight": normal(D, D)}

  def test_weights_with_nans_or_infinities_are_refused(self):
    for number, dtype in (
      (np.nan, np.float32),
      (np.inf, np.float16),
      (-np.inf, ml_dtypes.bfloat16),
    ):
      for verify in (False, True):
        path = self.file(
          {n: x.astype(dtype) for n, x in self.tensors(number).items()}
        )
        target = self.empty() / "out.safetensors"
        with self.assertRaisesRegex(
          ERROR,
          rf"'bad.weight': a weight must be finite, got {number} at \[3, 5\]",
        ):
          self.quantize(path, target=target, verify=verify)
        self.assertEqual([*target.parent.iterdir()], [])
        done = self.quantize(path, exclude="bad", verify=verify)
        self.assertEqual(done.nonfinite, ())

  def test_allowed_ones_are_never_called_verified(self):
    path = self.file(self.tensors(np.nan))
    done = self.quantize(path, verify=True, allow_nonfinite=True)
    self.assertEqual([*done.errors], ["good.weight"])
    self.assertEqual(done.nonfinite, ("bad.weight",))
    self.assertIn("verified: 1 weights, bit by bit", str(done))
    self.assertIn(
      "not verified, because of NaNs or infinities: bad.weight", str(done)
    )
    done = self.quantize(
      path, verify=True, allow_nonfinite=True, include="bad.weight"
    )
    self.assertNotRegex(str(done), r"(?m)^verified")


class FilesTest(Case):
  def test_folder_is_whole(self):
    source = self.folder()
    done = self.quantize(source, layout="compressed-tensors")
    self.assertCountEqual(
      [str(x.relative_to(done.path)) for x in done.path.rglob("*")],
      [
        *("model-0.safetensors", "model-1.safetensors", "config.json"),
        *("tokenizer.json", "1_Pooling", "1_Pooling/config.json"),
        "model.safetensors.index.json",
      ],
    )
    self.assertEqual((done.path / "tokenizer.json").read_text(), "words")
    self.assertEqual([*source.parent.iterdir()], [source])
    index = json.loads((done.path / "model.safetensors.index.json").read_text())
    names, size = {}, 0
    for path in done.path.glob("*.safetensors"):
      its = safetensors_files.open_file(path).tensors
      names |= dict.fromkeys(its, path.name)
      size += sum(x.nbytes for x in its.values())
    self.assertEqual(index["weight_map"], names)
    self.assertEqual(index["metadata"]["total_size"], size)
    # The parts of a weight stay in its file.
    up = f"{BASE}.mlp.up_proj.weight"
    self.assertEqual(names[f"{up}_packed"], "model-1.safetensors")
    self.assertIn("not copied: pytorch_model.bin", str(done))

  def test_header_and_offsets_are_aligned(self):
    done = self.quantize(self.folder())
    for path in done.path.glob("*.safetensors"):
      data = path.read_bytes()
      size = int.from_bytes(data[:8], "little")
      self.assertEqual(size % 8, 0)
      header = json.loads(data[8 : 8 + size])
      self.assertEqual(
        header.pop("__metadata__"),
        {"format": "pt", "jaxplugin.layout": "modelopt"},
      )
      items = {"F32": 4, "I64": 8, "BF16": 2, "F16": 2}
      for entry in header.values():
        begin = entry["data_offsets"][0]
        self.assertEqual(begin % items.get(entry["dtype"], 1), 0)

  def test_configurations_are_those_of_the_tools(self):
    for layout in ("modelopt", "compressed-tensors", "torchao"):
      done = self.quantize(self.folder(), layout=layout)
      config = json.loads((done.path / "config.json").read_text())
      told = config.pop("quantization_config")
      self.assertEqual(config, {"a": 1})
      self.assertEqual(told["quant_method"], layout)
      key = "modules_to_not_convert" if layout == "torchao" else "ignore"
      left = [f"{BASE}.{x}" for x in ("mlp.gate", "mlp.short")]
      left += [f"{BASE}.self_attn.q_norm", "lm_head", "model.embed_tokens"]
      self.assertEqual(told[key], sorted(left))
      path = done.path / "hf_quant_config.json"
      self.assertEqual(path.exists(), layout == "modelopt")
      if layout == "modelopt":
        said = json.loads(path.read_text())["quantization"]
        self.assertEqual(said["quant_algo"], "W4A16_NVFP4")
        self.assertEqual(said["group_size"], 16)
        self.assertEqual(said["exclude_modules"], sorted(left))

  def test_tied_head_is_among_what_is_left(self):
    done = self.quantize(self.folder(shards=[{"a.weight": normal(D, D)}]))
    config = json.loads((done.path / "config.json").read_text())
    self.assertEqual(config["quantization_config"]["ignore"], ["lm_head"])

  def test_dry_run_writes_nothing(self):
    source = self.folder()
    target = self.empty() / "out"
    done = self.quantize(source, target=target, dry_run=True)
    self.assertEqual([*target.parent.iterdir()], [])
    self.assertIn("nothing was written", str(done))
    written = self.quantize(source, target=target)
    self.assertEqual(done.nbytes, written.nbytes)
    sizes = [
      x.nbytes
      for path in target.glob("*.safetensors")
      for x in safetensors_files.open_file(path).tensors.values()
    ]
    self.assertEqual(done.nbytes, sum(sizes))


class SelectionTest(Case):
  def chosen(self, source=None, format="nvfp4", **options):
    done = self.quantize(
      source or self.folder(), format, dry_run=True, **options
    )
    taken = [x.tensor.name for x in done.decisions if x.format]
    return taken, {x.tensor.name: x.reason for x in done.decisions}

  def test_reasons_are_told(self):
    taken, reasons = self.chosen()
    self.assertCountEqual(taken, WEIGHTS)
    self.assertEqual(
      {n: r for n, r in reasons.items() if r},
      {
        "model.embed_tokens.weight": "an embedding",
        f"{BASE}.input_layernorm.weight": "rank 1",
        f"{BASE}.self_attn.q_norm.weight": "a norm",
        f"{BASE}.mlp.gate.weight": "a router",
        f"{BASE}.mlp.short.weight": "k=40 is not a multiple of 16",
        f"{BASE}.self_attn.q_proj.bias": "not named *.weight",
        "position_ids": "I64 is not one of F32, BF16, F16",
        "lm_head.weight": "a head",
      },
    )
    linear = {"b.weight": normal(D, D)}
    for name, x, options, reason in (
      ("stack", normal(2, D, D), {}, "rank 3, and not named experts"),
      ("none.weight", normal(0, D), {}, "empty"),
      (
        "w",
        normal(D, D),
        {"layout": "torchao"},
        "a dot; name it 'w.weight', or",
      ),
      (
        "w",
        normal(D, D),
        {"layout": "comfyui"},
        r"only weights named \*.weight; name it 'w.weight', or",
      ),
    ):
      include = {"include": ["*"]} if options else {}
      source = self.file({name: x, **linear})
      taken, reasons = self.chosen(source, **options, **include)
      self.assertEqual(taken, ["b.weight"])
      self.assertRegex(reasons[name], reason)

  def test_globs_choose(self):
    taken, reasons = self.chosen(include=["lm_head", "*.k_proj.weight"])
    self.assertCountEqual(
      taken, ["lm_head.weight", f"{BASE}.self_attn.k_proj.weight"]
    )
    self.assertEqual(reasons["model.embed_tokens.weight"], "not included")
    taken, reasons = self.chosen(exclude=["*.self_attn.*", "*.up_proj"])
    self.assertCountEqual(
      taken, [f"{BASE}.mlp.{x}_proj.weight" for x in ("gate", "down")]
    )
    self.assertEqual(reasons[f"{BASE}.mlp.up_proj.weight"], "excluded")

  def test_string_is_one_glob(self):
    taken, _ = self.chosen(include="*.k_proj")
    self.assertEqual(taken, [f"{BASE}.self_attn.k_proj.weight"])
    taken, _ = self.chosen(exclude="*_proj.*", include="*.[qk]*")
    self.assertEqual(taken, [f"{BASE}.self_attn.q_norm.weight"])
    x = self.file({"a.experts.up": normal(2, D, D)})
    done = self.quantize(x, transposed="a.*", dry_run=True)
    self.assertEqual(done.decisions[0].axis, -2)
    for name in ("include", "exclude", "transposed"):
      with self.assertRaisesRegex(TypeError, f"{name} must be a glob or a"):
        self.chosen(**{name: [3]})

  @parameterized.parameters(
    ({"include": ["*.qq_proj"]}, r"include='\*.qq_proj' must match a tensor"),
    ({"exclude": ["x"]}, "exclude='x' must match a tensor"),
    ({"transposed": ["x"]}, "transposed='x' must match a tensor"),
    ({"exclude": ["lm_haed.weight"]}, "tensor; near names: lm_head.weight;"),
    ({"transposed": ["lm_head"]}, "must match experts .*got 'lm_head.weight'"),
    (
      {"include": ["*.k_proj", "*.short"]},
      r"include='\*.short' must match .*k=40 is not a multiple of 16",
    ),
    ({"exclude": ["*"]}, "none of the .* can be quantized .*excluded"),
    ({"layout": "gpt-oss", "format": "mxfp4"}, "none of the"),
  )
  def test_globs_that_do_nothing_are_an_error(self, options, rule):
    with self.assertRaisesRegex(ERROR, rule):
      self.chosen(**options)

  @parameterized.parameters(
    ("gguf", "nvfp4", "layout must be one of modelopt, compressed-tensors"),
    (
      "gpt-oss",
      "nvfp4",
      "stores mxfp4, got nvfp4; for nvfp4 choose layout modelopt, comp",
    ),
    ("comfyui", "mxfp4", "comfyui stores nvfp4, mxfp8, got"),
    ("modelopt", "mxfp6_e2m3", "that a layout stores, got mxfp6_e2m3"),
    ("modelopt", "int4", "int4"),
  )
  def test_layouts_and_formats_that_are_none(self, layout, format, rule):
    with self.assertRaisesRegex(ValueError, rule):
      self.chosen(self.empty(), format, layout=layout)

  def test_experts_that_a_layout_has_not_are_left(self):
    x = {"a.experts.up": normal(2, D, D), "b.weight": normal(D, D)}
    for layout, format, transposed, rule in (
      ("modelopt", "nvfp4", False, "modelopt does not store a stack.*its own"),
      ("modelopt", "mxfp8", True, "modelopt does not store mxfp8 experts"),
      ("compressed-tensors", "mxfp4", False, "stack .* torchao"),
      ("torchao", "mxfp4", True, "torchao stores k as the last"),
    ):
      options = {"transposed": ["a.*"]} if transposed else {}
      taken, reasons = self.chosen(
        self.file(x), format, layout=layout, **options
      )
      self.assertEqual(taken, ["b.weight"])
      self.assertRegex(reasons["a.experts.up"], rule)

  def test_bias_that_contradicts_the_order_of_experts_is_refused(self):
    x = {
      "experts.gate_up_proj": normal(2, D, 3 * D),
      "experts.gate_up_proj_bias": normal(2, 3 * D),
    }
    with self.assertRaisesRegex(
      ERROR, "k is assumed to be dimension 2 .*pass transposed="
    ):
      self.chosen(self.file(x), "mxfp4", layout="gpt-oss")

  def test_models_whose_k_comes_first_are_left(self):
    source = self.folder({"model_type": "gpt2"})
    with self.assertRaisesRegex(
      ERROR, "none of the .*k comes before n in gpt2"
    ):
      self.chosen(source)

  def test_name_that_would_be_there_twice_is_refused(self):
    x = {"a.weight": normal(D, D), "a.weight_packed": normal(3)}
    with self.assertRaisesRegex(ERROR, "'a.weight_packed'"):
      self.chosen(self.file(x), layout="compressed-tensors")


class RefusedTest(Case):
  def assert_refused(self, rule, source, target=None, error=ERROR, **options):
    target = target or self.empty() / (
      "out.safetensors" if source.is_file() else "out"
    )
    # Other programs may write to the folder, so only this target's files count.
    files = lambda: sorted(target.parent.glob(f"*{target.stem}*"))
    before = files()
    with self.assertRaisesRegex(error, rule):
      self.quantize(source, target=target, **options)
    self.assertEqual(files(), before)

  def test_targets_that_are_no_place(self):
    source = self.folder()
    there = self.empty()
    (there / "x").write_text("")
    self.assert_refused("already exists", source, there)
    self.assert_refused("must be an existing folder", source, there / "y" / "z")
    self.assert_refused("must be an existing folder", source, there / "x" / "z")
    self.assert_refused("must be a folder, as", source, there / "z.safetensors")
    file = self.file({"a.weight": normal(D, D)})
    self.assert_refused("must be a .safetensors file", file, there / "z")
    self.assert_refused("already exists", file, file)

  def test_empty_folder_is_a_place(self):
    target = self.empty()
    self.quantize(self.folder(), target=target)
    self.assertTrue((target / "config.json").is_file())

  def test_others_partial_folder_is_left_alone(self):
    target = self.empty() / "out"
    other = target.with_name("out.partial")
    other.mkdir()
    (other / "mine").write_text("mine")
    self.assert_refused("is not an unfinished result", self.folder(), target)
    self.assertEqual((other / "mine").read_text(), "mine")

  def test_quantized_sources(self):
    done = self.quantize(self.folder())
    self.assert_refused("config.json has a quantization_config", done.path)
    (done.path / "config.json").unlink()
    self.assert_refused(r"already quantized \(modelopt, nvfp4\)", done.path)
    other = self.write(b"GGUF", "x.gguf")
    self.assert_refused("source must be safetensors files, got .*gguf", other)

  def test_global_scale_that_readers_refuse(self):
    x = normal(D, D, dtype=np.float32)
    x[0, 0] = 3000
    self.assert_refused(
      "'a.weight': its global scale, 1.11607, is outside.*exclude the weight",
      self.file({"a.weight": x}),
    )

  def test_folder_that_nobody_may_write(self):
    target = pathlib.Path("/sys/jaxplugin-out")
    if not target.parent.is_dir():
      self.skipTest("this system has no such folder")
    with self.assertRaisesRegex(
      ERROR, "/sys/jaxplugin-out was not written: .*/sys/jaxplugin-out.partial"
    ):
      self.quantize(self.folder(), target=target)

  def test_disk_that_is_too_small(self):
    usage = shutil.disk_usage("/")
    with mock.patch.object(
      shutil, "disk_usage", return_value=usage._replace(free=1000)
    ):
      self.assert_refused(r"needs [\d,]+ bytes, .* 1,000", self.folder())

  @parameterized.parameters(False, True)
  def test_disk_that_is_or_becomes_full(self, is_folder):
    source = self.folder() if is_folder else self.file(model()[1])
    biggest = max(
      x.stat().st_size for x in [source, *source.parent.glob("in/*")]
    )
    self.quantize(source)  # compiles, which may write files
    target = self.empty() / ("out" if is_folder else "out.safetensors")
    for limit in (0, biggest // 8):
      with file_size_limit(limit):
        self.assert_refused("was not written: File too large", source, target)
    self.quantize(source, target=target)
    self.assertEqual([*target.parent.iterdir()], [target])

  def test_folder_of_a_process_killed_at_the_first_byte_is_taken(self):
    target = self.empty() / "out"
    partial = target.with_name("out.partial")
    partial.mkdir()
    # The task's file has a dot in front, and its temporary file another one.
    (partial / "..jaxplugin-quantize.json.unfinished").write_text("{")
    self.quantize(self.folder(), target=target)
    self.assertEqual([*target.parent.iterdir()], [target])

  def test_finished_files_stay_for_the_next_time(self):
    source, target = self.folder(), self.empty() / "out"
    self.interrupt(source, target)
    partial = target.with_name("out.partial")
    self.assertEqual([*target.parent.iterdir()], [partial])
    first = partial / "model-0.safetensors"
    self.assertCountEqual(
      [x.name for x in partial.iterdir()],
      [first.name, ".jaxplugin-quantize.json"],
    )
    before = first.stat()
    self.quantize(source, target=target)
    after = (target / first.name).stat()
    self.assertEqual(
      (before.st_ino, before.st_mtime_ns), (after.st_ino, after.st_mtime_ns)
    )
    self.assert_same_files(target, self.quantize(source).path)

  def assert_same_files(self, one, other):
    for x in one.rglob("*"):
      if x.is_file():
        self.assertEqual(
          x.read_bytes(), (other / x.relative_to(one)).read_bytes()
        )

  def interrupt(self, source, target):
    """Quantizes until some files are finished."""
    calls = iter(range(100))

    def stop(*_):
      if next(calls) == 11:
        raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      self.quantize(source, target=target, progress=stop)

  def test_finished_files_of_another_task_are_not_taken(self):
    source = self.folder()
    negated = [{name: -x for name, x in file.items()} for file in model()]
    for other, options in (
      (source, {"exclude": ["*.q_proj"], "verify": True}),
      (self.folder(shards=negated), {}),
    ):
      target = self.empty() / "out"
      self.interrupt(source, target)
      self.quantize(other, target=target, **options)
      self.assert_same_files(target, self.quantize(other, **options).path)

  def test_finished_file_has_its_head_and_size(self):
    path = self.empty() / "x.safetensors"
    shard = staging.Shard(
      name=path.name, decisions=(), head=b"head", begins={}, size=6
    )
    self.assertFalse(staging.is_finished(path, shard))
    for data, expected in (
      (b"head12", True),
      (b"heap12", False),
      (b"head1", False),
      (b"head123", False),
    ):
      path.write_bytes(data)
      self.assertEqual(staging.is_finished(path, shard), expected, data)

  def test_verify_sees_a_bit_that_differs(self):
    first, second = model()
    second["position_ids"] = np.arange(10_000)  # more than one chunk
    write, source = staging.write, self.folder(shards=(first, second))
    target = self.empty() / "out"
    names = [f"{BASE}.self_attn.k_proj.weight", "position_ids"]

    for name in [
      f"{names[0]}_scale_2",
      names[0],
      f"{names[0]}_scale",
      names[1],
    ]:

      def spoilt(path, shard, pieces, name=name):
        def changed():
          for tensor, start, data in pieces:
            if tensor == name:
              data = data.copy()
              data[0] ^= 1
            yield tensor, start, data

        write(path, shard, changed())

      with (
        mock.patch.object(staging, "write", spoilt),
        self.assertRaisesRegex(ERROR, "on the disk differs|it differs"),
      ):
        self.quantize(source, target=target, verify=True)
      # Nothing is left for the next call to reuse.
      self.assertEqual([*target.parent.iterdir()], [])

  def test_two_processes_do_not_write_one_target(self):
    source, target = self.folder(), self.empty() / "out"

    def twice(*_):
      with self.assertRaisesRegex(ERROR, "another process writes"):
        self.quantize(source, target=target)

    self.quantize(source, target=target, progress=twice)


class DamagedSourceTest(Case):
  def test_shard_that_is_damaged_or_not_there(self):
    source, target = self.folder(), self.empty() / "out"
    shard = source / "model-1.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with self.assertRaisesRegex(ERROR, "model-1.*must end with the file"):
      self.quantize(source, target=target)
    shard.unlink()
    with self.assertRaisesRegex(ERROR, "names model-1.*does not exist"):
      self.quantize(source, target=target)
    self.assertEqual([*target.parent.iterdir()], [])

  def test_file_that_becomes_shorter_is_refused(self):
    source, target = self.folder(), self.empty() / "out"
    shard = source / "model-1.safetensors"

    def cut(*_):
      shard.write_bytes(shard.read_bytes()[:1000])

    with self.assertRaisesRegex(ERROR, "got a shorter one"):
      self.quantize(source, target=target, progress=cut)
    self.assertFalse(target.exists())


class CommandTest(Case, command_lines.CommandLineTestCase):
  def test_table_tells_all(self):
    target = self.empty() / "out"
    status, out, _ = self.run_command(
      *("quantize", str(self.folder()), str(target)),
      *("--format", "mxfp8", "--verify"),
      *("--exclude", "*.q_proj", "*.k_proj", "--layout", "torchao"),
    )
    self.assertEqual(status, 0)
    lines = out.splitlines()
    (down,) = [x.split() for x in lines if "mlp.down" in x]
    self.assertEqual(
      down[:8], ["mxfp8", "[64,", "128]", "16.4", "kB", "8.4", "kB", "1"]
    )
    self.assertBetween(float(down[8]), 0.01, 0.05)
    self.assertRegex(
      " ".join(out.split()),
      r"not quantized, excluded: .*self_attn\.q_proj\.weight",
    )
    self.assertIn("verified: 5 weights", out)
    found = jp.checkpoints.load(target)
    self.assertEqual(
      found.entries[f"{BASE}.mlp.up_proj.weight"].format, jp.MXFP8
    )

  def test_errors_are_lines(self):
    folders = map(str, (self.folder(), self.folder()))
    self.check_error(["quantize", *folders], "error: .* already exists")
