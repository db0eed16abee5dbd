# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0

from absl.testing import parameterized

from jaxplugin.core import parameter_names


class ParameterNamesTest(parameterized.TestCase):
  @parameterized.parameters(
    ("Block_0/LayerNorm_1", ["block", "layer", "norm"]),
    ("model.layers.12.mlp.up_proj", ["model", "layers", "mlp", "up", "proj"]),
    ("RMSNorm/scale", ["rms", "norm", "scale"]),
    ("lm_head", ["lm", "head"]),
    ("wte", ["wte"]),
  )
  def test_words_of_both_styles(self, name, words):
    self.assertEqual(parameter_names.words(name), words)

  @parameterized.parameters(
    ("params/embed/embedding", "embedding", "'embed'"),
    ("model.embed_tokens.weight", "embedding", "'embed'"),
    ("transformer.wpe.weight", "embedding", "'wpe'"),
    ("layers/0/input_layernorm/weight", "norm", "'layernorm'"),
    ("params/RMSNorm_0/kernel", "norm", "'norm'"),
    ("params/before/scale", "norm", "'scale'"),
    ("h.0.ln_1.weight", "norm", "'ln'"),
    ("lm_head/kernel", "last layer", "'head'"),
    ("decoder/logits_dense/kernel", "last layer", "'logits'"),
    ("params/decoder/logitdense/kernel", "last layer", "'logitdense'"),
    ("token_decoder/logits_dense/kernel", "last layer", "'logits'"),
    ("params/output/kernel", "last layer", "'output'"),
    ("output.weight", "last layer", "'output'"),
    ("params/output_proj/kernel", "last layer", "'output_proj'"),
    ("params/unembed/W_U", "last layer", "'unembed'"),
    ("params/unembedding/kernel", "last layer", "'unembedding'"),
    ("params/LMHead_0/Dense_0/kernel", "last layer", "'LMHead_0'"),
    ("cls/predictions/decoder/kernel", "last layer", "'predictions'"),
    ("score/kernel", "last layer", "'score'"),
    ("classifier/dense/kernel", "last layer", "'classifier'"),
    ("params/Conv_0/kernel", "convolution", "'conv'"),
    ("mixer.conv1d.weight", "convolution", "'conv'"),
    ("mlp.router.weight", "experts", "'router'"),
    ("q_proj/lora_A", "adapter", "'lora'"),
    ("mlp/gate_proj_bias", "bias", "'bias'"),
  )
  def test_what_no_product_has_is_left(self, name, what, word):
    reason = parameter_names.reason_to_leave(name)
    self.assertIn(what, reason)
    self.assertIn(word, reason)

  @parameterized.parameters(
    "params/Dense_0/kernel",
    "params/MultiHeadDotProductAttention_0/query/kernel",
    "params/multi_head/out/kernel",
    "params/MultiHead_0/out/kernel",
    "bert/encoder/layer/0/output/dense/kernel",
    "bert/encoder/layer/0/attention/output/dense/kernel",
    "params/layers/output/kernel",
    "params/mlp/output/kernel",
    "FlaxGPT2LMHeadModel/transformer/h/0/mlp/c_fc/kernel",
    "ImageClassifier/Dense_0/kernel",
    "output_gate/kernel",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "encoder/position_wise_up/kernel",
    "experts/down/kernel",
    "scale_up/kernel",
  )
  def test_weights_of_products_may_be_taken(self, name):
    self.assertEqual(parameter_names.reason_to_leave(name), "")
