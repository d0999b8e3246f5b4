# SPDX-License-Identifier: MIT
"""The bytes of .pt files, read without torch and without running code that is in them.

    torch_file.load(path)          the content: tensors become Tensor, other objects Stub
    schema.expect(content, ...)    raises CheckpointError if it is not what a checkpoint has there
    sources.ByteReader             reads elements of a Source, and compares checksums

A Source is where the elements of a tensor are: an Extent of one file, or a Joined of parts.
Needs Python alone, and of this package errors.py.
"""
