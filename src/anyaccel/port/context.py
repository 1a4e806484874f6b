# SPDX-License-Identifier: Apache-2.0
"""What the rules share while one file is looked at: its tree, the spelling of get_accelerator, the claimed nodes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import libcst as cst
from libcst.metadata import Access
from libcst.metadata.scope_provider import GlobalScope, ImportAssignment

from anyaccel.port import tables, usage
from anyaccel.port.facts import facts
from anyaccel.port.project import NO_PROJECT, Project
from anyaccel.port.syntax import OTHER_DEVICE, attribute, call, device_index, dotted, text_of
from anyaccel.port.tree import Tree
from anyaccel.vendors import OTHERS, WITHOUT_BACKEND

GET_ACCELERATOR = "get_accelerator"
_OURS = {f"{module}.{GET_ACCELERATOR}" for module in ("anyaccel", "anyaccel.accelerator", "deepspeed.accelerator")}
_OTHER_AVAILABILITY = re.compile(rf"torch\.(?:backends\.mps|{'|'.join(OTHERS)})\.is_available")
_OF_CUDA = re.compile(r"cuda|nvidia|nccl|requires?_\w*gpu", re.IGNORECASE)
_ABOUT_CUDA = re.compile(r"cuda|\.cu\b", re.IGNORECASE)
_MOVES = re.compile(r"(?:\w+_)?to_(?:cuda|gpu)\w*|cuda|_cuda", re.IGNORECASE)
# In names such as is_xpu_available, torch.xpu and x.is_npu.
VENDORS = re.compile(rf"(?<![a-z])(?:{'|'.join(OTHERS + WITHOUT_BACKEND)})(?![a-z])", re.IGNORECASE)
_OTHER_VENDOR = re.compile(rf"(?:{'|'.join(OTHERS)}|xla)(?::\d+)?")
_NOT_SCRIPTED = {"torch.jit.ignore", "torch.jit.unused"}
# Marks of tests that need a device.
SKIPS = {"skipif", "skipIf", "skipUnless", "skip_if", "skip_unless"}
_RAW = {"cuda_stream", "cudart", "raw_cuda_graph"}
_RUNTIMES = {"cuda", "cupy", "cupyx", "tensorrt", "pycuda", "numba"}
_OF_NVIDIA = re.compile(r"nvidia|nv_?link|nvml|nccl|cudnn|cublas", re.IGNORECASE)
_OF_EVERY_TORCH = re.compile(r"import (?:torch|torch\.distributed)(?: as \w+)?$|import (?:logging|os|sys)$")
_SETS_UP = re.compile(r"(?:_*(?:logg|handler|formatter)\w*|warnings|sys|os|torch|np|numpy|random|matplotlib|plt)\.")
_SCRIPTING = {"script", "script_method", "script_if_tracing", "export", "unused", "ignore", "is_scripting", "interface"}


class Context:
    """One file being looked at."""

    def __init__(self, tree: Tree, project: Project = NO_PROJECT, partial: bool = False, held: str = "") -> None:
        self.tree = tree
        self.project = project
        self.partial = partial
        self.held = held
        self._claimed: set[cst.CSTNode] = set()
        self._scripted = {
            name
            for node in tree.nodes
            if isinstance(node, cst.Call) and tree.imported(node.func) == "torch.jit.script"
            for arg in node.args[:1]
            for name in [dotted(arg.value)]
        }
        self.accelerator, self.has_accelerator = self._spelling()

    def _spelling(self) -> tuple[str, bool]:
        """The name of get_accelerator in this file, and whether the file imports it already."""
        taken = False
        for scope in self.tree.scopes:
            for name, assignments in scope._assignments.items():
                for assignment in assignments:
                    full = {each.name for each in assignment.get_qualified_names_for(name)}
                    ours = isinstance(assignment, ImportAssignment) and full <= _OURS
                    if ours and isinstance(scope, GlobalScope) and len(assignments) == 1:
                        return name, True
                    taken = taken or (name == GET_ACCELERATOR and not ours)
        return ("get_anyaccel_accelerator" if taken else GET_ACCELERATOR), False

    def method(self, name: str) -> cst.BaseExpression:
        """`get_accelerator().<name>`."""
        return attribute(call(cst.Name(self.accelerator)), name)

    def torch_at(self, node: cst.CSTNode) -> str | None:
        """The name of torch at this node; None where `torch` is something else."""
        name = self.tree.name_of("torch", node)
        if name is None and not self.tree.is_bound("torch"):
            return "torch"  # it is imported along with get_accelerator
        return name

    def claim(self, node: cst.CSTNode) -> None:
        """Keep other rules off this node and all in it."""
        self._claimed.add(node)

    def is_claimed(self, node: cst.CSTNode) -> bool:
        return bool(self._claimed) and any(each in self._claimed for each in (node, *self.tree.parents(node)))

    def is_stored(self, node: cst.CSTNode) -> bool:
        """Whether this expression is the target of an assignment or of `del`."""
        parent = self.tree.parent(node)
        if isinstance(parent, cst.AssignTarget | cst.Del):
            return True
        if isinstance(parent, cst.AnnAssign | cst.AugAssign | cst.For | cst.CompFor | cst.NamedExpr):
            return parent.target is node
        return isinstance(parent, cst.AsName)

    def is_scripted(self, node: cst.CSTNode) -> bool:
        """Whether TorchScript compiles the function around this node, which knows no get_accelerator().

        It does where the function or class is marked for it, or asks torch.jit.is_scripting().
        """
        for around in self.tree.parents(node):
            if isinstance(around, cst.FunctionDef):
                marks = {self.tree.imported(_undecorated(each.decorator)) or "" for each in around.decorators}
                if marks & _NOT_SCRIPTED:
                    return False
            if not isinstance(around, cst.FunctionDef | cst.ClassDef):
                continue
            if around.name.value in self._scripted or any(around in self.tree.parents(u) for u in self._jit_uses):
                return True
        return False

    @functools.cached_property
    def _jit_uses(self) -> list[cst.CSTNode]:
        """Decorators and questions of TorchScript."""
        return [
            each
            for each in self.tree.nodes
            if type(each) is cst.Attribute
            and each.attr.value in _SCRIPTING
            and (self.tree.imported(each) or "").startswith("torch.jit.")
        ]

    def is_availability(self, node: cst.CSTNode, module: str) -> bool:
        """Whether it asks if this module's device is there; an empty module stands for every other than CUDA's."""
        if not isinstance(node, cst.Call) or node.args:
            return False
        name = self.tree.imported(node.func) or ""
        return name == f"{module}.is_available" if module else _OTHER_AVAILABILITY.fullmatch(name) is not None

    def is_device_spelling(self, node: cst.CSTNode) -> bool:
        """Whether it is a literal device, as a string or within torch.device()."""
        if isinstance(node, cst.Call) and self.tree.imported(node.func) == "torch.device" and len(node.args) == 1:
            node = node.args[0].value
        text = text_of(node)
        return (text is not None and OTHER_DEVICE.fullmatch(text) is not None) or device_index(node) is not False

    def about_cuda(self, node: cst.CSTNode) -> str:
        """Which class or function around this node is CUDA's own by its name; empty for none."""
        for around in self.tree.parents(node):
            name = around.name.value if isinstance(around, cst.FunctionDef) else ""
            if _MOVES.fullmatch(name) and not name.startswith("test"):
                continue
            if isinstance(around, cst.ClassDef | cst.FunctionDef) and _OF_CUDA.search(around.name.value):
                return around.name.value
        return ""

    def chooses_vendor(self, node: cst.CSTNode) -> bool:
        """Whether the function, or at the top of a module the statement, asks for devices of other vendors too."""
        around = self.tree.enclosing(node, cst.FunctionDef) or self.tree.enclosing(
            node, cst.If, cst.SimpleStatementLine
        )
        if around is None:
            return False
        if isinstance(around, cst.If):
            while isinstance(self.tree.parent(around), cst.If):
                around = self.tree.parent(around)
        return any(around in self.tree.parents(each) for each in self._vendor_questions)

    @functools.cached_property
    def _vendor_questions(self) -> list[cst.CSTNode]:
        """Calls of what another vendor's name is in, such as is_xpu_available(), and names of such devices."""
        named = [(each, dotted(each.func) or "") for each in self.tree.nodes if isinstance(each, cst.Call)]
        found: list[cst.CSTNode] = [each for each, name in named if VENDORS.search(name)]
        return found + [
            each
            for each in self.tree.nodes
            if type(each) is cst.SimpleString and _OTHER_VENDOR.fullmatch(text_of(each) or "") is not None
        ]

    @functools.cached_property
    def kept_elsewhere(self) -> list[str]:
        """What holds in other files of the project whether CUDA is there."""
        own = facts(self.tree.text).keeps if self.project.keeps else frozenset()
        return sorted(self.project.keeps - own)

    def names_vendors_beside(self, node: cst.CSTNode) -> bool:
        """Whether the function around this node asks for another vendor's device, or names one, outside of it."""
        function = self.tree.enclosing(node, cst.FunctionDef)
        asked = (each for each in self._vendor_questions if node not in self.tree.parents(each))
        return function is not None and any(function in self.tree.parents(each) for each in asked)

    def beside_vendors(self, node: cst.CSTNode) -> bool:
        """Whether the condition that this is in, or one of its alternatives, names another vendor."""
        top = node
        operations = cst.BooleanOperation | cst.UnaryOperation | cst.Comparison | cst.ComparisonTarget
        while isinstance(self.tree.parent(top), operations):
            top = self.tree.parent(top)
        tests = [top]
        chain = self.tree.parent(top)
        while isinstance(chain, cst.If):
            tests.append(chain.test)
            below = chain.orelse
            if not isinstance(below, cst.If):
                break
            chain = below
        return any(VENDORS.search(self.tree.module.code_for_node(test)) for test in tests)

    def says_so(self, node: cst.CSTNode) -> bool:
        """Whether a text about CUDA is in the statement around it, or in the body of an `if` or `for` around it."""
        kinds = (cst.BaseSmallStatement, cst.If, cst.For, cst.While, cst.With, cst.FunctionDef, cst.ClassDef)
        around = self.tree.enclosing(node, *kinds)
        governs = isinstance(around, cst.BaseSmallStatement | cst.If | cst.For)
        return around is not None and governs and any(around in self.tree.parents(text) for text in self._texts)

    @functools.cached_property
    def _texts(self) -> list[cst.CSTNode]:
        """Strings that are about CUDA, other than names of devices."""
        found: list[cst.CSTNode] = []
        for node in self.tree.nodes:
            if type(node) is cst.SimpleString:
                text = node.value
            elif type(node) is cst.FormattedString:  # without the code in its braces, which may be replaced
                text = "".join(part.value for part in node.parts if isinstance(part, cst.FormattedStringText))
            else:
                continue
            if _ABOUT_CUDA.search(text) and device_index(node) is False:
                found.append(node)
        return found

    def uses_of_attribute(self, target: cst.CSTNode) -> list[cst.CSTNode]:
        """Where the file reads this `a.b`."""
        name = dotted(target)
        return [each for each in self.tree.attributes if dotted(each) == name and not self.is_stored(each)]

    def at_import(self, node: cst.CSTNode) -> str:
        """Why code here runs when its module is imported, where no accelerator should be chosen; empty elsewhere."""
        child = node
        for around in self.tree.parents(node):
            match around:
                case cst.FunctionDef() if around.name.value == "__init__" and self._is_made_at_import(around):
                    return "a part of an instance that the module makes"
                case cst.Lambda() | cst.FunctionDef() | cst.Annotation():
                    return ""
                case cst.Decorator():
                    return "" if self._is_decided_at_import(around.decorator) else "a decorator"
                case cst.Param() if around.default is child:
                    function = self.tree.enclosing(around, cst.FunctionDef, cst.Lambda)
                    if not isinstance(function, cst.Lambda):
                        return "a default"
                    # A lambda in a function is made when that function runs.
                    inside = self.tree.enclosing(function, cst.FunctionDef, cst.Lambda) is not None
                    return self.at_import(function) or ("" if inside else "a default")
                case cst.ClassDef():
                    return "an attribute of a class"
                case cst.Module() if isinstance(child, cst.SimpleStatementLine) and self._is_library:
                    # CUDA_0 = torch.device("cuda:0"); wait = torch.cuda.synchronize
                    if isinstance(child.body[0], cst.Assign | cst.AnnAssign) and not self._asks(child):
                        return "a name of the module"
                    # torch.cuda.empty_cache()
                    called = isinstance(child.body[0], cst.Expr) and not self._asks(child)
                    notebook = tables.CELL_MARK in self.tree.text
                    return "a call at the top of the module" if called and not notebook else ""
            child = around
        return ""

    def _is_made_at_import(self, function: cst.FunctionDef) -> bool:
        """Whether the module makes an instance of this method's class where it is imported: config = _Config()."""
        around = self.tree.enclosing(function, cst.ClassDef, cst.FunctionDef)
        name = around.name.value if isinstance(around, cst.ClassDef) else ""
        for each in self.calls.get(name, ()) if self._is_library else ():
            where = self.tree.enclosing(each, cst.FunctionDef, cst.ClassDef, cst.Lambda, cst.If)
            if not isinstance(each.func, cst.Name):
                continue
            if where is None:
                return True
            within = isinstance(where, cst.FunctionDef) and where.name.value == "__init__" and where is not function
            if within and isinstance(where, cst.FunctionDef) and self._is_made_at_import(where):
                return True
        return False

    def _asks(self, statement: cst.CSTNode) -> bool:
        """Whether a statement calls is_available(), so that it asked what there is at import before as well."""
        asked = self.calls.get("is_available", ())
        return any(statement in self.tree.parents(each) for each in asked)

    @property
    def runs(self) -> bool:
        """Whether the module is a script, which does something of its own when it is run."""
        return not self._is_library

    @functools.cached_property
    def _is_library(self) -> bool:
        """Whether the module defines something and does nothing else of its own when it is run."""
        body = self.tree.module.body
        lines = [each for line in body if isinstance(line, cst.SimpleStatementLine) for each in line.body]
        calls = [each.value for each in lines if isinstance(each, cst.Expr) and isinstance(each.value, cst.Call)]
        code = self.tree.module.code_for_node
        runs = [each for each in calls if not _SETS_UP.match(code(each))]
        return not runs and any(isinstance(each, cst.FunctionDef | cst.ClassDef) for each in body)

    def _is_decided_at_import(self, decorator: cst.BaseExpression) -> bool:
        """Whether a decorator asked at import before as well, or can be asked at no other time."""
        called = self.tree.imported(_undecorated(decorator)) or dotted(_undecorated(decorator)) or ""
        name = usage.last_name(called)
        return name in SKIPS or name in ("custom_fwd", "custom_bwd", "parametrize")

    def raw_cuda(self, node: cst.CSTNode) -> str:
        """What of CUDA's own runtime the function around this node uses; empty for nothing."""
        function = self.tree.enclosing(node, cst.FunctionDef)
        if function is None:
            return ""
        return next((name for each, name in self._raw_uses if function in self.tree.parents(each)), "")

    @functools.cached_property
    def _raw_uses(self) -> list[tuple[cst.CSTNode, str]]:
        """Raw handles of streams, and names that come from packages which need CUDA."""
        found: list[tuple[cst.CSTNode, str]] = []
        for node in self.tree.nodes:
            if type(node) is cst.Attribute and node.attr.value in _RAW:
                found.append((node, node.attr.value))
            elif type(node) is cst.Name and node.value in self.tree.imported_names:
                root = (self.tree.imported(node) or "").split(".")[0]
                if root in _RUNTIMES:
                    found.append((node, root))
        return found

    def in_own_cuda(self, node: cst.CSTNode) -> bool:
        """Whether it stands in a method cuda() of a class, which says CUDA to its callers."""
        function = self.tree.enclosing(node, cst.FunctionDef)
        while isinstance(function, cst.FunctionDef):
            around = self.tree.enclosing(function, cst.FunctionDef, cst.ClassDef)
            if function.name.value == "cuda" and isinstance(around, cst.ClassDef):
                return True
            function = around
        return False

    def own_class(self, receiver: cst.CSTNode, own: frozenset[str]) -> str:
        """Which of these classes of the project the receiver may be an instance of; empty for none."""
        if not own or self._is_of_torch(receiver):
            return ""
        name = dotted(receiver) or ""
        if name in ("self", "cls"):
            around = self.tree.enclosing(receiver, cst.ClassDef)
            return around.name.value if isinstance(around, cst.ClassDef) and around.name.value in own else ""
        last = usage.last_name(name).lower().replace("_", "")
        known = [each for each in self._classes if each in own]
        known += [each for each in sorted(own) if len(last) > 3 and (last in each.lower() or each.lower() in last)]
        return known[0] if known else ""

    def _is_of_torch(self, node: cst.CSTNode) -> bool:
        """Whether it is for sure a tensor or module of torch: what one of its functions returns, or a name for that."""
        while isinstance(node, cst.Call | cst.Subscript) or (isinstance(node, cst.Attribute) and dotted(node) is None):
            if isinstance(node, cst.Call) and (self.tree.imported(node.func) or "").startswith("torch."):
                return True
            node = node.func if isinstance(node, cst.Call) else node.value
        if not isinstance(node, cst.Name):
            return False
        values = []
        for assignment in self.tree.scope(node)[node.value]:
            statement = self.tree.enclosing(getattr(assignment, "node", node), cst.Assign, cst.BaseStatement)
            values.append(statement.value if isinstance(statement, cst.Assign) else None)
        calls = [each for each in values if isinstance(each, cst.Call)]
        return (
            bool(values)
            and len(calls) == len(values)
            and all((self.tree.imported(each.func) or "").startswith("torch.") for each in calls)
        )

    @functools.cached_property
    def _classes(self) -> list[str]:
        """Names that the file gives to classes and to all else, in any scope."""
        defined = {name for scope in self.tree.scopes for name, found in scope._assignments.items() if found}
        return sorted(defined)

    @functools.cached_property
    def calls(self) -> dict[str, list[cst.Call]]:
        """Calls by the last name of what is called: f() and x.f() by f."""
        calls: dict[str, list[cst.Call]] = {}
        for each in self.tree.nodes:
            if isinstance(each, cst.Call) and isinstance(each.func, cst.Name | cst.Attribute):
                name = each.func.value if isinstance(each.func, cst.Name) else each.func.attr.value
                calls.setdefault(name, []).append(each)
        return calls

    @functools.cached_property
    def choices(self) -> frozenset[str]:
        """Options whose choices name CUDA: what they say are words of the command line."""
        names: set[str] = set()
        for each in self.calls.get("add_argument", ()):
            listed = [arg.value for arg in each.args if arg.keyword is not None and arg.keyword.value == "choices"]
            if any("cuda" in self.tree.module.code_for_node(value) for value in listed):
                texts = [text_of(arg.value) or "" for arg in each.args if arg.keyword is None]
                names.update(text.lstrip("-").replace("-", "_") for text in texts)
        return frozenset(names)

    def uses(self, target: cst.Name) -> Iterator[cst.CSTNode]:
        """Where a variable is read, by the scope that it is assigned in."""
        for assignment in self.tree.scope(target)[target.value]:
            for access in assignment.references:
                if isinstance(access, Access):
                    yield access.node

    def calls_cuda(self, region: cst.CSTNode, replaced: set[cst.CSTNode]) -> bool:
        """Whether what is guarded calls or imports something that has CUDA in its name, and is not ported."""
        for node in self._cuda_calls:
            around = [node, *self.tree.parents(node)]
            spoken_for = {around[0], around[1], getattr(node, "func", node)} & replaced
            if region in around and not spoken_for:
                return True
        return False

    def questions(self, replaced: set[cst.CSTNode]) -> list[cst.CSTNode]:
        """What asks for CUDA by its name in conditions, such as is_cuda_available() and Backend.NCCL, not ported."""
        asked = [
            each
            for each in self.tree.nodes
            if isinstance(each, cst.Call)
            and re.search("cuda", usage.last_name(dotted(each.func) or ""), re.IGNORECASE)
            and not {each, each.func} & replaced
        ]
        named = (each for each in self.tree.attributes if each.attr.value in ("NCCL", "CUDA"))
        compared = (cst.Comparison, cst.ComparisonTarget)
        return [
            *asked,
            *(each for each in named if each.attr.value == "NCCL" or isinstance(self.tree.parent(each), compared)),
        ]

    @functools.cached_property
    def _cuda_calls(self) -> list[cst.CSTNode]:
        """Calls and imports of something with CUDA in its name, imports that may fail, and uses of device_ids."""
        found: list[cst.CSTNode] = []
        for node in self.tree.nodes:
            name = ""
            if type(node) is cst.Call:
                name = _OF_NVIDIA.sub("cuda", usage.last_name(dotted(node.func) or ""))
            elif type(node) is cst.ImportFrom or type(node) is cst.Import:
                name = self.tree.module.code_for_node(node)
                tried = self.tree.enclosing(node, cst.Try, cst.FunctionDef, cst.If).__class__ is cst.Try
                if tried and not _OF_EVERY_TORCH.match(name.strip()):
                    name = "cuda"  # what may be missing is a kernel
            elif type(node) is cst.Name and node.value == "device_ids":
                name = "cuda"  # DistributedDataParallel takes it for GPUs only
            elif type(node) is cst.SimpleString and node.raw_value == "device_ids":
                name = "cuda"
            if re.search("cuda|gpu", name, re.IGNORECASE) and not name.endswith("is_available"):
                found.append(node)
        return found


def _undecorated(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.func if isinstance(node, cst.Call) else node
