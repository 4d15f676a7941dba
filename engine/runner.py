"""
The host's part of a step: the scheduler's `Plan` to the device, and its tokens back.

The `Device` (device.py) knows of each running request what a step needs, so a plan carries only
what changed; ops/inputs.py lays it out on the flat token axis. On a GPU a step is one launch, of a
CUDA graph. `launch` starts a step and `wait_for` waits for it: between the two the engine
(engine.py) plans the next one.
"""

from array import array

from engine.device import Device, Launched, PackedPlan
from ops.inputs import StepShape, pack
from paged import Plan, Request
from params import Settings


class Runner:
    """Launches plans on a device. Nothing in a step waits for the device but `wait_for`."""

    def __init__(self, device: Device, settings: Settings):
        self.device = device
        # for `pack`: tokens of decodes are given, as a request may have several
        self.S_if_given = settings.block_size if settings.speculate else 0

    def launch(self, plan: Plan) -> Launched:
        """
        Start to compute a plan: write the K, V of its tokens, and sample. `Device.send` brings the
        tokens to the host.
        """
        device = self.device
        if plan.copies:  # copy-on-write, before the step writes into them
            device.copy_blocks(plan.copies)
        if plan.admitted:
            device.fill_rows(*plan.admitted)
        # A decode's new block is among the inputs that `pack` makes. The device needs whole tables
        # where that is not enough: for guesses, which may see more new blocks; and for programs.
        if device.program or plan.guesses:
            changed = [r for r in plan.grown if r.row is not None]
            if changed:
                device.fill_tables(changed)
        return device.run(self.pack(plan))

    def pack(self, plan: Plan) -> PackedPlan:
        """Choose the shape of a plan, and pack its inputs."""
        device = self.device
        shape = self.padded_shape(plan)
        if device.program:  # it computes no row more than it must
            places = list(range(shape.n, shape.n + len(plan.completed)))
            return PackedPlan(plan, shape, places, array("q"))
        places = [shape.n + i for i, (r, _) in enumerate(plan.chunks) if r in plan.completed]
        groups = None
        if device.finder and not plan.chunks and not plan.guesses:
            groups = device.finder.find(plan.decodes)
        if groups:
            fitting = (padded for padded in device.shapes_with_groups if padded.n >= shape.n)
            shape = next(fitting, device.finder.shape(shape.n))
        padding = (device.padding_row, device.pool.padding_block)
        inputs = pack(plan, shape, *padding, self.S_if_given, groups or ())
        return PackedPlan(plan, shape, places, inputs)

    def padded_shape(self, plan: Plan) -> StepShape:
        """
        The smallest padded shape that holds a plan. If none does, the plan's own shape, with only
        its decodes padded, if steps are padded at all.
        """
        n = len(plan.decodes) + sum(map(len, plan.guesses.values()))  # a row for each guess, too
        C = len(plan.chunks)
        T = sum(m for _, m in plan.chunks)
        for shape in self.device.shapes:  # the smallest come first
            if shape.n >= n and shape.C >= C and shape.T >= T:
                return shape
        if n and self.device.shapes:
            n = min(shape.n for shape in self.device.shapes if shape.n >= n)
        return StepShape(n, C, T)

    def wait_for(self, launched: Launched) -> dict[Request, list[int]]:
        """
        Wait until a step is done. Returns the tokens of each request of plan.sampled, one after
        each of its guesses, right or wrong; NO_TOKEN where the logits are no numbers.
        """
        if launched.done:
            launched.done.synchronize()
        plan = launched.packed.plan
        computed = launched.on_host.tolist()
        # the hot loop; after the decodes come padding and chunks
        tokens = {r: [token] for r, token in zip(plan.decodes, computed)}  # noqa: B905
        if plan.guesses:
            start = 0
            for request in plan.decodes:
                end = start + plan.num_sampled(request)
                tokens[request] = computed[start:end]
                start = end
        for request, place in zip(plan.completed, launched.packed.places, strict=True):
            tokens[request] = [computed[place]]
        return tokens
