# SPDX-License-Identifier: Apache-2.0
"""Small helpers on LibCST nodes: reading them and building new ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import libcst as cst

from anyaccel.vendors import VENDORS

DEVICE_LITERAL = re.compile(r"cuda(?::(\d+))?")
OTHER_DEVICE = re.compile(rf"(?:{'|'.join(VENDORS)}|meta)(?::\d+)?")


def dotted(node: cst.CSTNode) -> str | None:
    """`a.b.c` of such an expression; None for every other."""
    parts: list[str] = []
    while type(node) is cst.Attribute:
        parts.append(node.attr.value)
        node = node.value
    if type(node) is not cst.Name:
        return None
    return ".".join([node.value, *reversed(parts)])


def text_of(node: cst.CSTNode | None) -> str | None:
    """The value of a plain string literal; None for everything else, bytes and f-strings included."""
    if not isinstance(node, cst.SimpleString) or "b" in node.prefix:
        return None
    value = node.evaluated_value
    return value if isinstance(value, str) else None


def number(value: int) -> cst.Integer:
    return cst.Integer(str(value))


def call(function: cst.BaseExpression, *arguments: cst.BaseExpression | cst.Arg) -> cst.Call:
    """A call with these arguments, in the usual spacing."""
    args = [argument if isinstance(argument, cst.Arg) else cst.Arg(argument) for argument in arguments]
    return cst.Call(function, separated(args))


def separated(args: Sequence[cst.Arg]) -> list[cst.Arg]:
    """The arguments with a comma after each but the last."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = len(args) - 1
    return [arg.with_changes(comma=comma if i < last else cst.MaybeSentinel.DEFAULT) for i, arg in enumerate(args)]


def with_first(call_node: cst.Call, first: cst.Arg) -> list[cst.Arg]:
    """The call's arguments after a new first one, their own layout kept."""
    if not call_node.args:
        return [first]
    comma = cst.Comma(whitespace_after=call_node.whitespace_before_args)
    if isinstance(call_node.whitespace_before_args, cst.SimpleWhitespace):
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    return [first.with_changes(comma=comma), *call_node.args]


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """`name=value` as an argument."""
    none = cst.SimpleWhitespace("")
    equal = cst.AssignEqual(whitespace_before=none, whitespace_after=none)
    return cst.Arg(value, keyword=cst.Name(name), equal=equal)


def both(left: cst.BaseExpression, right: cst.BaseExpression) -> cst.BooleanOperation:
    """`left and right`."""
    loose = isinstance(left, cst.IfExp | cst.Lambda | cst.NamedExpr) or (
        isinstance(left, cst.BooleanOperation) and isinstance(left.operator, cst.Or)
    )
    if loose and not left.lpar:
        left = left.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.BooleanOperation(left, cst.And(), right)


def attribute(base: cst.BaseExpression, *names: str) -> cst.BaseExpression:
    for name in names:
        base = cst.Attribute(base, cst.Name(name))
    return base


def same_parentheses(new: cst.BaseExpression, old: cst.CSTNode) -> cst.BaseExpression:
    """`new` within the parentheses that stood around `old`."""
    if isinstance(old, cst.BaseExpression):
        return new.with_changes(lpar=[*old.lpar], rpar=[*old.rpar])
    return new


def bind(args: Sequence[cst.Arg], parameters: Sequence[str]) -> dict[str, cst.Arg] | None:
    """Which argument goes to which parameter; None when it cannot be told or there are others."""
    bound: dict[str, cst.Arg] = {}
    for position, arg in enumerate(args):
        if arg.star:
            return None
        if arg.keyword is None and position >= len(parameters):
            return None
        name = parameters[position] if arg.keyword is None else arg.keyword.value
        if name not in parameters or name in bound:
            return None
        bound[name] = arg
    return bound


def renamed(args: Sequence[cst.Arg], names: Mapping[str, str]) -> list[cst.Arg]:
    """The arguments with other keywords."""
    return [
        arg.with_changes(keyword=arg.keyword.with_changes(value=names.get(arg.keyword.value, arg.keyword.value)))
        if arg.keyword is not None
        else arg
        for arg in args
    ]


def is_simple(node: cst.CSTNode) -> bool:
    """Whether evaluating it twice, or not at all, is the same: names, attributes of names, numbers and strings."""
    return isinstance(node, cst.Integer | cst.SimpleString) or dotted(node) is not None


def device_index(node: cst.CSTNode) -> cst.BaseExpression | bool | None:
    """For an expression that spells a CUDA device: its index, None without one; False for any other expression.

    'cuda', 'cuda:1', f'cuda:{i}', 'cuda:' + str(i), 'cuda:%d' % i, 'cuda:{}'.format(i).
    """
    text = text_of(node)
    if text is not None:
        match = DEVICE_LITERAL.fullmatch(text)
        if match is None:
            return False
        return None if match[1] is None else number(int(match[1]))
    if isinstance(node, cst.FormattedString):
        return _index_of_format(node)
    if isinstance(node, cst.BinaryOperation):
        left = text_of(node.left)
        if isinstance(node.operator, cst.Add) and left == "cuda:":
            inner = _argument_of_str(node.right)
            return False if inner is None else inner
        if isinstance(node.operator, cst.Modulo) and left in ("cuda:%d", "cuda:%s", "cuda:%i"):
            right = node.right
            if isinstance(right, cst.Tuple):
                return right.elements[0].value if len(right.elements) == 1 else False
            return right
    match node:
        case cst.Call(func=cst.Attribute(attr=cst.Name("format"), value=pattern), args=[arg]):
            if (
                text_of(pattern) in ("cuda:{}", "cuda:{0}", "cuda:{:d}", "cuda:{0:d}")
                and arg.keyword is None
                and not arg.star
            ):
                return arg.value
    return False


def _index_of_format(node: cst.FormattedString) -> cst.BaseExpression | bool:
    if len(node.parts) != 2 or "r" in node.prefix.lower():
        return False
    head, value = node.parts
    if not isinstance(head, cst.FormattedStringText) or head.value != "cuda:":
        return False
    if not isinstance(value, cst.FormattedStringExpression) or value.equal is not None:
        return False
    spec = "".join(each.value for each in value.format_spec or () if isinstance(each, cst.FormattedStringText))
    plain = value.conversion in (None, "s") and (not value.format_spec or spec == "d")
    return value.expression if plain else False


def _argument_of_str(node: cst.BaseExpression) -> cst.BaseExpression | None:
    if isinstance(node, cst.Call) and dotted(node.func) == "str" and len(node.args) == 1 and not node.args[0].star:
        return node.args[0].value
    return node if isinstance(node, cst.Name | cst.Attribute | cst.Subscript) else None


def names_in_target(node: cst.BaseExpression) -> Iterator[str]:
    """The last name of an assignment's target: `device` of self.device; a literal key of a subscript."""
    if isinstance(node, cst.Name):
        yield node.value
    elif isinstance(node, cst.Attribute):
        yield node.attr.value
    elif isinstance(node, cst.Subscript) and len(node.slice) == 1:
        index = node.slice[0].slice
        yield (text_of(index.value) or "") if isinstance(index, cst.Index) else ""
    else:
        yield ""
