# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""A killed process leaves no incomplete files, and memory is bounded."""

import json
import random

import ml_dtypes
import numpy as np
import pytest

import jaxplugin as jp
from jaxplugin.testing import checkpoint_files as files
from jaxplugin.testing import contract

KILLS = 10
SHARDS, WEIGHTS = 5, 3
SIZE = 768  # size of a square weight in the test of memory
FEW, MANY = 6, 30

# JAX is imported once. Processes are forked before JAX starts a thread, and
# each prints a line for every tensor. A process is killed after some tensors
# and a delay. Without a delay it waits until it is killed. Then the files that
# it left are printed.
KILLED = """
import json, os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import jaxplugin as jp
source, target, waits = *sys.argv[1:3], json.loads(sys.argv[3])
for tensors, seconds in waits:
  read, write = os.pipe()
  child = os.fork()
  if not child:
    def tell(done, total):
      os.write(write, b"x")
      if seconds is None and done == tensors:
        signal.pause()
    jp.checkpoints.quantize(source, target, "nvfp4", progress=tell)
    os._exit(0)
  os.close(write)
  for _ in range(tensors):
    if not os.read(read, 1):
      break
  time.sleep(seconds or 0)
  os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)
  os.close(read)
  partial = target + ".partial"
  inodes = {}
  if os.path.isdir(partial):
    inodes = {
      x: os.stat(os.path.join(partial, x)).st_ino
      for x in sorted(os.listdir(partial)) if x.endswith(".safetensors")
    }
  print(json.dumps([os.path.exists(target), inodes]), flush=True)
"""

# Prints the most bytes that NumPy, Python and JAX held in each of two calls.
MEASURED = """
import sys, tracemalloc
import jax
import jaxplugin as jp
few, many, target = sys.argv[1:]
for i, source in enumerate((few, few, many)):  # the first one compiles
  held = [0]
  def note(done, total):
    held.append(sum(x.nbytes for x in jax.live_arrays()))
  tracemalloc.start()
  jp.checkpoints.quantize(
    source, f"{target}{i}", "nvfp4", verify=True, progress=note
  )
  print(max(held) + tracemalloc.get_traced_memory()[1], end=" ")
  tracemalloc.stop()
"""


def run(source, *args):
  done = contract.run_program(source, *args)
  done.check_returncode()
  return done.stdout.splitlines()


class Case(files.CheckpointTestCase):
  def checkpoint(self, shards, weights, size):
    """Returns a folder of bf16 weights [size, size]."""
    folder = self.empty()
    block = np.random.default_rng(0).standard_normal((size, size))
    block = (block / 50).astype(ml_dtypes.bfloat16)
    for i in range(shards):
      tensors = {f"{i}.{j}.weight": np.roll(block, i) for j in range(weights)}
      self.file(tensors, path=folder / f"{i}.safetensors")
    (folder / "tokenizer.json").write_text("words")
    return folder


class KilledTest(Case):
  @pytest.mark.full
  def test_target_appears_whole_or_not_at_all(self):
    source = self.checkpoint(SHARDS, WEIGHTS, 64)
    choose = random.Random(8)
    waits = [(2 * WEIGHTS + 1, None)]  # after two finished files
    waits += [
      (choose.randrange(1, SHARDS * WEIGHTS), choose.random() / 50)
      for _ in range(KILLS)
    ]
    target = self.empty() / "out"
    told = run(KILLED, source, target, json.dumps([*waits, (99, 0)]))
    kept = {}
    for (there, inodes), (tensors, _) in zip(
      map(json.loads, told[:-1]), waits, strict=True
    ):
      if there:  # the process ended before it was killed
        continue
      # Files that were finished then are complete and do not change.
      self.assertGreaterEqual(len(inodes), tensors // WEIGHTS - 1)
      self.assertEqual({**inodes, **kept}, inodes)
      kept = inodes
    self.assertNotEmpty(kept)
    wanted = self.empty() / "out"
    jp.checkpoints.quantize(source, wanted, "nvfp4")
    self.assertEqual([x.name for x in target.parent.iterdir()], ["out"])
    files = {x.name: x.read_bytes() for x in target.iterdir()}
    self.assertEqual(files, {x.name: x.read_bytes() for x in wanted.iterdir()})
    self.assertIn("tokenizer.json", files)
    for name, inode in kept.items():
      self.assertEqual((target / name).stat().st_ino, inode)


class MemoryTest(Case):
  @pytest.mark.full
  def test_memory_is_that_of_a_few_tensors(self):
    few = self.checkpoint(1, FEW, SIZE)
    many = self.checkpoint(1, MANY, SIZE)
    (told,) = run(MEASURED, few, many, self.empty() / "out")
    _, most_of_few, most_of_many = map(int, told.split())
    self.assertGreater(most_of_few, 2 * SIZE * SIZE)
    self.assertLess(most_of_many - most_of_few, 2 * SIZE * SIZE)
