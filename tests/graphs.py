"""Looks into the graph of a run, by the names that roles have within a group."""

from dataclasses import replace

from tianji.build import Assembly, look, makes


def assemblies(config, make=None):
    """What makes the parts of each group, of roles that other processes would make."""
    setup, graph = look(config, make)
    return [
        Assembly(
            config,
            replace(setup, spec=replace(setup.spec, group=group)),
            graph,
            make or makes(config),
        )
        for group in range(setup.spec.groups)
    ]


def role_names(joined):
    return [str(replace(name, group=None)) for name in joined.names()]


def ends(joined, role):
    """What a role of the group holds of conduits."""
    (name,) = (name for name in joined.names() if str(replace(name, group=None)) == role)
    return [end for joint in joined.graph.joints for end in joint.ends_of([name])]


def conduits(joined, what):
    """Those of all groups in which something travels."""
    return [joint.conduit for joint in joined.graph.joints if joint.what == what]
