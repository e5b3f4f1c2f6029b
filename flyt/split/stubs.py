# SPDX-License-Identifier: Apache-2.0
"""Writes the C of a stub library and of a function table from one table of prototypes."""

from __future__ import annotations

from flyt.split.prototypes import Prototype, Table

HEAD = "/* SPDX-License-Identifier: Apache-2.0 */\n/* Generated from a table of prototypes. */\n"

CALLBACKS = 8
"""Functions of one callback type that are known at a time: SPLIT_CALLBACKS of upper/stub.h."""


def _types(function: Prototype) -> str:
    return ", ".join(kind for kind, _ in function.parameters) or "void"


def _call(
    function: Prototype, target: str, arguments: str, leave: str = "split_leave(split_back);"
) -> list[str]:
    """The C statements that call, go back and, where there is a result, return it."""
    keep = "" if function.result == "void" else f"{function.result} split_result = "
    return [f"    {keep}{target}({arguments});", f"    {leave}"] + (
        [] if function.result == "void" else ["    return split_result;"]
    )


def _callback(callback: Prototype) -> str:
    """Thunks that a lower half may call in place of the upper half's functions of this type."""
    name = callback.name
    listed = ", ".join(f"{kind} {name}" for kind, name in callback.parameters) or "void"
    arguments = ", ".join(parameter for _, parameter in callback.parameters)
    leave = "split_leave_upper(&split_called);"
    lines = [
        f"typedef {callback.result} (*{name})({_types(callback)});",
        f"static void *known_{name}[SPLIT_CALLBACKS];",
    ]
    for slot in range(CALLBACKS):
        lines += [
            f"static {callback.result} thunk_{name}_{slot}({listed}) {{",
            "    struct split_called split_called;",
            "    split_enter_upper(&split_called, flyt_split_info, split_half);",
            *_call(callback, f"(({name})known_{name}[{slot}])", arguments, leave),
            "}",
        ]
    thunks = ", ".join(f"thunk_{name}_{slot}" for slot in range(CALLBACKS))
    return "\n".join(
        [
            *lines,
            f"static const {name} thunks_{name}[] = {{{thunks}}};",
            f"static {name} cross_{name}({name} function) {{",
            "    if (!function)",
            "        return function;",
            f'    unsigned slot = flyt_split_callback(known_{name}, (void *)function, "{name}");',
            f"    return thunks_{name}[slot];",
            "}",
            "",
        ]
    )


def _stub(table: Table, function: Prototype, index: int) -> str:
    listed = ", ".join(f"{kind} {name}" for kind, name in function.parameters) or "void"
    arguments = []
    before = []
    for kind, name in function.parameters:
        arguments.append(name)
        if kind in table.callbacks:  # while this is still the upper half
            before.append(f"    {name} = cross_{kind}({name});")
    return "\n".join(
        [
            f"SPLIT_EXPORT {function.result} {function.name}({listed}) {{",
            "    uint64_t split_back;",
            *before,
            f"    {function.result} (*split_function)({_types(function)}) =",
            f"        split_enter(&split_back, split_half, {index});",
            *_call(function, "split_function", ", ".join(arguments)),
            "}",
            "",
        ]
    )


def stub_source(table: Table) -> str:
    """C of the stub library: one function per prototype, that crosses and calls by index."""
    parts = [HEAD, *(f"#include {name}" for name in table.includes)]
    parts += ['#include "upper/stub.h"', "", "static unsigned split_half;", ""]
    parts += [
        "__attribute__((constructor(102))) static void find_half(void) {",
        f'    split_half = flyt_split_find("{table.half}", 0x{table.digest:x}ull);',
        "}",
        "",
    ]
    parts += [_callback(callback) for callback in table.callbacks.values()]
    parts += [_stub(table, function, index) for index, function in enumerate(table.functions)]
    return "\n".join(parts)


def table_source(table: Table) -> str:
    """C of the lower half's table: its own function ``lower_NAME`` for each prototype."""
    names = [f"lower_{function.name}" for function in table.functions]
    return "\n".join(
        [
            HEAD,
            '#include "lower/lower.h"',
            "",
            *(f"extern void {name}(void); /* only its address is of interest */" for name in names),
            "",
            f"const uint64_t lower_digest = 0x{table.digest:x}ull, lower_count = {len(names)};",
            "void *const lower_table[] = {",
            *(f"    (void *){name}," for name in names),
            "};",
            "",
        ]
    )


def version_script(node: str) -> str:
    """Symbol versions as the library has them that the stubs stand for."""
    return f"{node} {{ global: *; }};\n"
