"""Random layouts of random small models, and pairs of them to plan between."""

import math

import torch
from drivetrain_sharding import Layout, Mesh, Parameter, Part, Split, TensorSpec, make_plan
from hypothesis import strategies as st

GROUPS = {"alone": ["s", "v", "w", "x"], "fused": ["q", "k"], "experts": ["e0", "e1", "e2", "e3"]}


@st.composite
def tensor_shapes(draw):
    """By name: a scalar, a vector, matrices and a cube, a pair that can be fused, experts that can be stacked."""
    side = st.integers(1, 7)
    shapes = {"s": (), "v": (draw(side),), "w": (draw(side), draw(side)), "x": (draw(side), draw(side), draw(side))}
    width = draw(side)
    shapes |= {"q": (draw(side), width), "k": (draw(side), width)}
    return shapes | dict.fromkeys(GROUPS["experts"], (draw(side), draw(side)))


@st.composite
def splits(draw, mesh, shape, dims=None):
    """Splits of a tensor over some dimensions of the mesh, in any order, into fewer parts or padded at times."""
    found, cut = [], set()
    for over, ranks in draw(st.permutations(mesh)):
        dim = draw(st.sampled_from([None, *(range(len(shape)) if dims is None else dims)]))
        if dim is None:
            continue
        parts = draw(st.sampled_from([None, *(part for part in range(1, ranks) if ranks % part == 0)]))
        padded = None if dim in cut else draw(st.sampled_from([None, shape[dim] + 3]))
        found.append(Split(over=over, dim=dim, parts=parts, padded=padded))
        cut.add(dim)
    return tuple(found)


@st.composite
def layouts(draw, shapes, tie, most=6):
    """Some layout of these tensors over 1 to `most` ranks."""
    meshes = [(), (1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 2)]
    sizes = draw(st.sampled_from([sizes for sizes in meshes if math.prod(sizes) <= most]))
    mesh = tuple(zip("abc", sizes, strict=False))
    dtype = st.sampled_from([torch.float32, torch.bfloat16])
    dtypes = {name: draw(dtype) for name in shapes}
    parameters = []
    for group, names in GROUPS.items():
        if group == "alone" or draw(st.booleans()):
            for name in names:
                part = Part(tensor=name, splits=draw(splits(mesh, shapes[name])))
                parameters.append(Parameter(name=f"{name}.own", parts=(part,), dim=0))
            continue
        dtypes |= dict.fromkeys(names, draw(dtype))
        if group == "fused":
            parts = tuple(Part(tensor=name, splits=draw(splits(mesh, shapes[name], dims=[0]))) for name in names)
            parameters.append(Parameter(name="fused", parts=parts))
        else:
            over = draw(st.sampled_from([None, *mesh]))
            rest = tuple(dim for dim in mesh if dim != over)
            within = draw(splits(rest, shapes[names[0]]))
            parts = tuple(Part(tensor=name, splits=within, expert=index) for index, name in enumerate(names))
            experts = None if over is None else Split(over=over[0], dim=0)
            parameters.append(Parameter(name="stack", parts=parts, experts=experts))
    return Layout(
        mesh=Mesh(mesh),
        tensors=tuple(TensorSpec(name=name, dtype=dtypes[name], shape=shape) for name, shape in shapes.items()),
        parameters=tuple(draw(st.permutations(parameters))),
        ties={"other": "w"} if tie else {},
    )


@st.composite
def cases(draw):
    shapes, tie = draw(tensor_shapes()), draw(st.booleans())
    source, target = draw(layouts(shapes, tie)), draw(layouts(shapes, tie))
    place = st.sampled_from(["h0/g0", "h0/g1", "h0/g2", "h1/g0", "h1/g1", "h1/g2"])
    sides = st.tuples(*(st.lists(place, min_size=n.mesh.size, max_size=n.mesh.size) for n in (source, target)))
    return source, target, draw(st.one_of(st.none(), sides)), draw(st.sampled_from([128, 512, 1 << 20]))


def plan_of(source, target, places, bucket):
    """A plan with this bucket, or the next larger one that can hold the finest cut."""
    try:
        return make_plan(source, target, bucket_bytes=bucket, places=places)
    except ValueError as error:
        if f"bucket_bytes={bucket} is too small" not in str(error):
            raise
        return plan_of(source, target, places, 2 * bucket)
