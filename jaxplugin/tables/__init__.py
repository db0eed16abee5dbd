# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: measured times of implementations, and their lookup.

A table is a JSON file with times of some implementations for problems of one
operation on one device. Lowering measures nothing: a choice is a pure function
of the problem, the target and the tables.
"""
