"""Blocks of `explain`."""

from collections.abc import Sequence

from attncalc.report import Column, Report, Row, Table, number_text


def explain_report(inputs: Row, conventions: Row, results: list[Row], notes: Sequence[str]) -> Report:
    """`attncalc explain`: a block of text for each number."""
    columns = (
        Column("name", "name"),
        Column("formula", "formula"),
        Column("result", "result", number_text),
        Column("unit", "unit"),
    )
    text: list[str] = []
    place = source = None
    for row in results:
        if row["of"] != place:
            place, source = row["of"], None
            text += ["", place]
        if row["source"] != source:
            text += [*([""] if source else []), f"  source: {row['source']}"]
            source = row["source"]
        text += ["", f"  {row['name']}", f"    = {row['formula']}"]
        if row["values"] != row["formula"]:
            text.append(f"    = {row['values']}")
        text.append(f"    = {number_text(row['result'])} {row['unit']}")
        text += [f"    {where}" for where in row["where"]]
    shown = [{k: v for k, v in row.items() if k != "values"} for row in results]
    return Report(
        "explain",
        inputs,
        conventions,
        shown,
        (Table("", columns, results, shown=False),),
        tuple(notes),
        tuple(text[1:]),
        wrapped=False,
    )
