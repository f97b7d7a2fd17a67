"""Whether a step can hang, read off its wait-for graph, and why, in words."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.plan.folds.graph import Graph
from meshwright.plan.folds.words import in_words
from meshwright.plan.plan import Plan


def order(graph: Graph) -> tuple[int, ...]:
    """A topological order of what can happen: all nodes, unless the step hangs (Kahn 1962)."""
    blockers = [len(before) for before in graph.after]
    for number, instance in enumerate(graph.instances):
        if not instance.complete:
            blockers[graph.num_actions + number] += 1  # nobody ever takes this one away
    followers: list[list[int]] = [[] for _ in graph.after]
    for node, before in enumerate(graph.after):
        for each in before:
            followers[each].append(node)
    reached = [node for node, count in enumerate(blockers) if not count]
    for node in reached:
        for follower in followers[node]:
            blockers[follower] -= 1
            if not blockers[follower]:
                reached.append(follower)
    return tuple(reached)


def first_unreached(graph: Graph) -> dict[int, int]:
    """Rank -> the first action that never happens; empty where all do."""
    missing = set(range(graph.num_actions)).difference(order(graph))
    stuck = {}
    for rank, program in graph.programs.items():
        start = graph.first[rank]
        index = next((i for i in range(len(program.actions)) if start + i in missing), None)
        if index is not None:
            stuck[rank] = index
    return stuck


def problems(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """What is wrong with a step's communication, in words; nothing where it cannot hang."""
    reached = set(order(graph))
    if len(reached) == len(graph.after):
        return graph.mismatches
    return (*graph.mismatches, _why(plan, graph, reached))


def _why(plan: Plan, graph: Graph, reached: set[int]) -> str:
    """Follow what a node waits for until something lacks a member, or comes round again."""
    node = next(each for each in range(len(graph.after)) if each not in reached)
    path: list[int] = []
    while node not in path:
        path.append(node)
        waited = next((each for each in graph.after[node] if each not in reached), None)
        if waited is None:
            return "the step hangs: " + _chain(plan, graph, path) + ", which not all of its ranks launch"
        node = waited
    return "the step hangs: " + _chain(plan, graph, [*path[path.index(node) :], node])


def _chain(plan: Plan, graph: Graph, path: Sequence[int]) -> str:
    """The nodes of a path in words; actions that only come before others of their rank are left out."""
    told = []
    for place, node in enumerate(path):
        inside = 0 < place < len(path) - 1
        if inside and all(_is_action(graph, each) for each in path[place - 1 : place + 2]):
            continue
        told.append(_node(plan, graph, node))
    return " <- ".join(told)


def _is_action(graph: Graph, node: int) -> bool:
    return node < graph.num_actions


def _node(plan: Plan, graph: Graph, node: int) -> str:
    if not _is_action(graph, node):
        instance = graph.instances[node - graph.num_actions]
        rank, index = instance.issued[0]
        program = graph.programs[rank]
        ranks = ", ".join(map(str, instance.stream.ranks))
        return f"the {in_words(plan, program, program.actions[index])} of ranks {ranks}"
    rank = max((r for r in graph.first if graph.first[r] <= node), key=graph.first.__getitem__)
    program, index = graph.programs[rank], node - graph.first[rank]
    return f"rank {rank} action {index} ({in_words(plan, program, program.actions[index])})"
