"""Whether a chat template reads message content as a string or as a list of parts.

vLLM decides it by looking for a loop over some message's content in the template's syntax tree;
this is the same look (vLLM 0.32, `renderers/hf.py`), misjudgements included.
"""

from collections import deque
from collections.abc import Iterator

from jinja2 import nodes


class _Unexpected(Exception):
    """A loop or an assignment of a shape that vLLM's look does not expect."""


def reads_parts(tree: nodes.Template) -> bool:
    """Return whether content is handed over as parts (vLLM's "openai"), not as one string."""
    try:
        return any(True for _ in _content_loops(tree))
    except _Unexpected:  # vLLM takes "string" where its own look fails
        return False


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = set(_message_names(tree))
    parameters, in_macros = _macro_contents(tree, messages)
    for loop in tree.find_all(nodes.For):
        named = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if (
            any(_reads(loop.iter, name, "content") for name in messages)
            or (named is not None and named in parameters.get(id(loop), ()))
            or (named == "content" and id(loop) not in in_macros)
        ):
            _loop_name(loop)
            yield loop


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Yield the variables of loops over `messages`, or over what was assigned from it."""
    lists = list(_assigned(tree, "messages"))
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            yield _loop_name(loop)


def _assigned(tree: nodes.Template, name: str) -> Iterator[str]:
    yield name
    related = deque([name])
    seen = 0
    while related and seen < 1000:  # a template that assigns in a circle
        seen += 1
        current = related.popleft()
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, current):
                if not isinstance(assign.target, nodes.Name):
                    raise _Unexpected
                yield assign.target.name
                if assign.target.name != current:
                    related.append(assign.target.name)


def _macro_contents(
    tree: nodes.Template, messages: set[str]
) -> tuple[dict[int, set[str]], set[int]]:
    """Return, per loop inside a macro, the parameters that receive content; and all such loops."""
    parameters: dict[int, set[str]] = {}
    inside: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        found = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if found:
                parameters[id(loop)] = found
    return parameters, inside


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [*zip(names, call.args, strict=False)]
            given += [(word.key, word.value) for word in call.kwargs if word.key in names]
            for name, value in given:
                if any(_reads(value, message, "content") for message in messages):
                    found.add(name)
    return found


def _reads(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Return whether the expression is the variable (or its attribute), filtered or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _reads(node.node, variable, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, variable, key)
    if key is None:
        return _is_variable(node, variable)
    if isinstance(node, nodes.Getitem):
        constant = node.arg.value if isinstance(node.arg, nodes.Const) else None
        return constant == key and _is_variable(node.node, variable)
    return (
        isinstance(node, nodes.Getattr) and node.attr == key and _is_variable(node.node, variable)
    )


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _loop_name(loop: nodes.For) -> str:
    if isinstance(loop.target, nodes.Name):
        return loop.target.name
    raise _Unexpected
