# Copyright 2026 The jaxplugin Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measured choices: what was timed once, and which table is asked.

A table is a file of JSON that says for problems of one operation on one device
how long some implementations took. Nothing is timed here, or while a program is
lowered: a choice is a pure function of the problem, the target and the tables.
"""
