"""Read the compiled code of kernels that wait, and say where it could read too early or signal too early.

A wait holds what is behind it only as long as a compiler leaves it behind: a pipeliner starts a loop's first copies as
early as it may. And what a signal stands for is what every thread has stored before it, which takes a barrier, and for
bytes that the copy engine loads a fence. None of it shows in the interpreter, and on a GPU only now and then. So this
reads the code, where the compiler's own passes are done (TTGIR) and where LLVM is too (PTX); cross_compile.py has it
read of every form that the stages launch:

    wait      behind its loop comes its barrier, with nothing in between that touches memory; nothing of its tile is
              loaded before it that anybody stores meanwhile, but what the wait itself is made of; and a copy of
              what the kernel stores has its fence
    signal    before the add comes its barrier, with nothing in between; and before that the fence, where the tile has
              stored what copies load
    scope     what stands in a heap is signalled and looked at for the whole system, not for this GPU alone; and as
              often in the assembly

planted_waits.py shows that it sees these faults.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from triton.runtime.jit import JITFunction

# TTGIR: what touches memory.
COPY = r"async_copy_global_to_local|async_tma_copy_global_to_local|async_tma_gather"
READ = rf"tt\.load|tt\.descriptor_load|tt\.descriptor_gather|{COPY}"
WRITE = r"tt\.store|tt\.descriptor_store|async_tma_copy_local_to_global"
LOOK, SIGNAL = r"atomic_rmw add, acquire", r"atomic_rmw add, release"
BARRIER, FENCE = r"ttg\.barrier|gpu\.barrier", r'inline_asm "fence\.proxy\.async\.global;'
ELSEWHERE = "in another rank's heap"
OF_A_DESCRIPTOR = r"(_rows|_of_consumer)?_desc$"  # what a descriptor's name says beyond the tensor's
TOUCHES = "|".join((READ, WRITE, r"atomic_rmw", BARRIER, FENCE))


@dataclass(eq=False)
class Node:
    """An operation with its blocks."""

    text: str
    blocks: list[list["Node"]] = field(default_factory=list)

    def inside(self) -> Iterator["Node"]:
        """This operation, and all in its blocks, in order."""
        yield self
        for block in self.blocks:
            for node in block:
                yield from node.inside()

    def does(self, what: str) -> bool:
        return re.search(what, self.text) is not None


def parsed(ttgir: str) -> Node:
    """The module, from its text."""
    root = Node("", [[]])
    open_nodes = [root]
    for line in with_names(ttgir).splitlines():
        text = re.sub(r" loc\(.*?\)*$", "", line.strip())
        if text.startswith("}"):
            if text.endswith("{"):  # } else {, } do {
                open_nodes[-1].blocks.append([])
            else:
                open_nodes.pop()
        elif text and not text.startswith(("#", "^")):
            node = Node(text)
            open_nodes[-1].blocks[-1].append(node)
            if text.endswith("{"):
                node.blocks.append([])
                open_nodes.append(node)
    return root


def with_names(ttgir: str) -> str:
    """The same text, in which the partitions of a warp-specialised kernel call what they are given as the kernel does:
    they are functions of all of it, and number their arguments."""
    lines, given, named = [], [], {}
    for line in ttgir.splitlines():
        if "ttg.warp_specialize(" in line:
            given = re.findall(r"%[\w#]+", line.partition(") attributes")[0])
        if begins := re.match(r" *partition\d+\(", line):
            named = dict(zip(re.findall(r"(%\w+): ", line), given, strict=True))
            line = begins[0] + ") {"
        for number in set(re.findall(r"%arg\d+\b", line)) & named.keys():
            line = re.sub(rf"{number}\b", named[number], line)
        lines.append(line)
    return "\n".join(lines)


def walked(node: Node, around: tuple = ()) -> Iterator[tuple[Node, tuple]]:
    """Every operation with what is around it, from the inside out: (block, position in it, whose block)."""
    for block in node.blocks:
        for i, inner in enumerate(block):
            yield inner, ((block, i, node), *around)
            yield from walked(inner, ((block, i, node), *around))


def before(around: tuple) -> tuple[list[tuple[Node, tuple]], list[tuple[Node, tuple]]]:
    """What touches memory before an operation, in its tile's branch, and from there back to where its ticket begins;
    each with what is around it."""
    in_branch, in_loop = [], []
    for n, (block, i, owner) in enumerate(around):
        loop = owner.does(r"scf\.while")
        here = Node("", [block[:i]])
        earlier = [(node, (*inner, *around[n + 1 :])) for node, inner in walked(here) if node.does(TOUCHES)]
        (in_loop if loop else in_branch)[:0] = earlier
        if loop:
            break
    return in_branch, in_loop


def does_wait(kernel: JITFunction) -> bool:
    """Whether its own source waits, or that of what it gives to some of its warps to do."""
    given = [kernel.fn.__globals__[name] for name in re.findall(r"\(\s*(\w+),\s*\(", kernel.src)]
    return any(re.search(r"\bwait\w*\(", function.src) for function in (kernel, *given))


def wrong_in_ttgir(ttgir: str) -> list[str]:
    """What is wrong with the waits and signals of a kernel; an empty list for nothing."""
    root, wrong = parsed(ttgir), []
    stored_anywhere = {name_behind(*found) for found in walked(root) if found[0].does(WRITE)}
    changing = stored_anywhere | {ELSEWHERE}
    handed_on = stored_anywhere & {copied_name(node) for node, _ in walked(root)}
    waits = signals = 0
    for node, around in walked(root):
        is_wait = node.does(r"scf\.while") and any(inner.does(LOOK) for inner in chain(*node.blocks))
        is_copy, is_signal = copied_name(node) in handed_on, node.does(SIGNAL)
        if not (is_wait or is_copy or is_signal):
            continue
        block, i, _ = around[0]
        in_branch, in_loop = before(around)

        if is_wait:
            waits += 1
            behind = [inner for later in block[i + 1 :] for inner in later.inside() if inner.does(TOUCHES)]
            if not behind or not behind[0].does(BARRIER):
                wrong.append(f"wait {waits} has no barrier")
            needed = what_it_needs(node, around)
            reads = [earlier for earlier in in_branch if earlier[0].does(READ) and earlier[0] not in needed]
            early = {name_behind(*earlier) for earlier in reads}
            if early & changing or any(inner.does(COPY) for inner, _ in (*in_branch, *in_loop)):
                wrong.append(f"something is loaded before wait {waits}")

        if is_copy:
            looks = [n for n, (inner, _) in enumerate(in_branch) if inner.does(LOOK)]
            behind = [inner for inner, _ in in_branch[looks[-1] + 1 :]] if looks else []
            if len(behind) < 2 or not behind[1].does(FENCE):
                wrong.append(f"{copied_name(node)} is copied behind a wait without a fence, or behind none")

        if is_signal:
            signals += 1
            since = max((n + 1 for n, (inner, _) in enumerate(in_branch) if inner.does(SIGNAL)), default=0)
            done = [inner for inner, _ in in_branch[since:]]
            if not done or not done[-1].does(BARRIER):
                wrong.append(f"signal {signals} has no barrier")
            stored = {name_behind(*earlier) for earlier in in_branch[since:] if earlier[0].does(WRITE)}
            if stored & handed_on and not (len(done) > 1 and done[-2].does(FENCE)):
                wrong.append(f"signal {signals} has no fence")
    return list(dict.fromkeys(wrong)) if waits or signals else ["neither waits nor signals"]


def what_it_needs(wait: Node, around: tuple) -> list[Node]:
    """The operations that a wait's counter and its number of arrivals are made by: these cannot come behind it."""
    names = {name for node in wait.inside() for name in re.findall(r"%[\w]+", node.text)}
    needed = []
    for block, i, _ in around:
        for earlier in reversed(block[:i]):
            made, _, operands = earlier.text.partition(" = ")
            if made.partition(":")[0] in names:
                names |= set(re.findall(r"%[\w]+", operands))
                needed.append(earlier)
    return needed


def copied_name(node: Node) -> str | None:
    """What a copy by the copy engine loads: "act" for act_desc or act_rows_desc."""
    found = re.search(r"async_tma_copy_global_to_local %(\w+_desc)\b", node.text)
    return found and re.sub(OF_A_DESCRIPTOR, "", found[1])


def name_behind(node: Node, around: tuple) -> str:
    """What a load or store touches: "act" for a pointer that was made from act_ptr; ELSEWHERE for an address that was
    itself loaded. Blocks beside each other use the same names for different things, so a name is looked up from the
    inside out."""
    name = re.search(r"%([\w#]+)", node.text.partition(" = ")[2] or node.text)[1]
    for block, i, _ in around:
        for earlier in reversed(block[:i]):
            if made := re.match(rf"%{name}(?::\d+)? = (\S+) %([\w#]+)", earlier.text):
                if made[1] == "tt.load":
                    return ELSEWHERE
                name = made[2]
    return re.sub(OF_A_DESCRIPTOR, "", name.removesuffix("_ptr"))


def wrong_in_ptx(ptx: str) -> list[str]:
    """What LLVM has moved: signals whose stores do not all come before their barrier; loads before their wait."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    label_at = {line[:-1]: n for n, line in enumerate(lines) if re.fullmatch(r"\$\w+:", line)}
    comes_from: dict[int, list[int]] = {n: [] for n in range(len(lines))}
    for n, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        if target and target[1] in label_at:
            comes_from[label_at[target[1]]].append(n)
        if n + 1 < len(lines) and not re.match(r"(bra|ret)\b", line):
            comes_from[n + 1].append(n)

    def reached_backwards(start: int, stop: str, bad: str) -> bool:
        """Whether some path back from a line comes to what is bad before it comes to a stop."""
        seen, pending = set(), list(comes_from[start])
        while pending:
            n = pending.pop()
            if n not in seen:
                seen.add(n)
                if re.search(bad, lines[n]):
                    return True
                if not re.search(stop, lines[n]):
                    pending += comes_from[n]
        return False

    wrong = []
    for n, line in enumerate(lines):
        if re.search(r"\batom\.\S*release", line) and reached_backwards(n, r"bar\.sync", r"\bst\.global"):
            wrong.append(f"line {n + 1}: a store between a signal and its barrier")
        if re.search(r"\b(ld|atom)\.\S*acquire", line) and reached_backwards(
            n, r"atom\.\S*relaxed|setmaxnreg", r"cp\.async\.(c[ag]|bulk\S*shared::\w+\.global)"
        ):
            wrong.append(f"line {n + 1}: a copy between a ticket and its wait")
    return wrong


ROLES = {  # what a launch whose warps have roles has in its assembly
    "registers of a role's own": r"setmaxnreg",
    "a bulk copy to shared memory": r"cp\.async\.bulk\.tensor\S*shared::\w+\.global",
    "a step that is under way": r"cp\.async\.mbarrier\.arrive\.noinc",
    "a bulk copy from shared memory": r"cp\.async\.bulk\.tensor\S*global\.shared",
    "a wait for all of it, before a signal": r"bulk\.wait_group 0; (?:.*\n){1,12}?.*fence\.proxy\.async\.global"
    r"(?:.*\n){1,8}?.*bar\.sync(?:.*\n){1,12}?.*atom\.global\.gpu\.release",
}


def wrong_with_roles(ptx: str) -> list[str]:
    """What a warp-specialised kernel lacks."""
    return [f"no {what}" for what, pattern in ROLES.items() if not re.search(pattern, ptx)]


ASSEMBLY = {  # what the whole system is waited for with, or told by: on NVIDIA, on AMD
    "acquire": r"\.sys\.(acquire|acq_rel)\b|buffer_inv sc0 sc1",
    "release": r"\.sys\.(release|acq_rel)\b|buffer_wbl2 sc0 sc1",
}


def wrong_scopes(ttgir: str, assembly: str) -> list[str]:
    """Which atomics order bytes for this GPU alone, though other ranks look at what they change."""
    wrong, atomics = [], [(node, around) for node, around in walked(parsed(ttgir)) if node.does(r"atomic_rmw")]
    for node, around in atomics:
        if node.does(r", gpu,") and name_behind(node, around) == ELSEWHERE:
            wrong.append(f"in a heap, for this GPU alone: {re.search(r'atomic_rmw.*?%', node.text)[0]}")
    for order, instruction in ASSEMBLY.items():
        expected = sum(node.does(rf", ({order}|acq_rel), sys,") for node, _ in atomics)
        found = len(re.findall(instruction, assembly))
        if found < expected:
            wrong.append(f"{found} times {order} for the whole system, of {expected}")
    return wrong
