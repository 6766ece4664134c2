# SPDX-License-Identifier: Apache-2.0
"""Every file of a run: one struct per record, with a line of description per field.

A file is a JSON document, or JSON lines that begin with a header (files.py). Its first
field, `schema`, says which: it is the tag of the struct that is the document or the
header. formats.py lists the files; `kvtax look --fields` prints their fields.
"""


class RecordsError(Exception):
    """A file is missing, torn in the middle, or not what it should be."""

    exit_code = 2
