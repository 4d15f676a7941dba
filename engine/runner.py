"""
The host's part of a step: send the scheduler's `Plan` to the device, and fetch the tokens.

The `Device` (device.py) keeps the state of each running request, so a plan carries only what has
changed. ops/inputs.py lays out the plan on the flat token axis. On a GPU, a step is a single launch
of a CUDA graph. `launch` starts a step and `wait_for` waits until it is done. In between, the
engine (engine.py) plans the next step.
"""

from array import array

from engine.device import Device, Launched, PackedPlan
from ops.inputs import StepShape, pack
from paged import Plan, Request
from params import Settings


class Runner:
    """Launches plans on a device. Only `wait_for` waits for the device."""

    def __init__(self, device: Device, settings: Settings):
        self.device = device
        # For `pack`. If this is not 0, the inputs contain the tokens of decodes, because a request
        # with guesses has several.
        self.S_if_given = settings.block_size if settings.speculate else 0

    def launch(self, plan: Plan) -> Launched:
        """
        Start computing a plan: write the K and V of its tokens, and sample new tokens.
        `Device.send` then copies the sampled tokens to the host.
        """
        device = self.device
        if plan.copies:  # copy-on-write, before the step writes into the copies
            device.copy_blocks(plan.copies)
        if plan.admitted:
            device.fill_rows(*plan.admitted)
        # `pack` puts a decode's new block into the inputs. That is not enough for guesses, which
        # may need several new blocks, nor for programs, which read the tables on the device. For
        # both, whole tables are filled.
        if device.program or plan.guesses:
            changed = [r for r in plan.tables_changed if r.row is not None]
            if changed:
                device.fill_tables(changed)
        return device.run(self.pack(plan))

    def pack(self, plan: Plan) -> PackedPlan:
        """Choose the padded shape of a plan, and pack its inputs."""
        device = self.device
        shape = self.padded_shape(plan)
        if device.program:  # a program samples only for chunks that complete their prompt
            indices = list(range(shape.n, shape.n + len(plan.prefilled)))
            return PackedPlan(plan, shape, indices, array("q"))
        indices = [shape.n + i for i, (r, _) in enumerate(plan.chunks) if r in plan.prefilled]
        groups = None
        if device.finder and not plan.chunks and not plan.guesses:
            groups = device.finder.find(plan.decodes)
        if groups:
            fitting = (padded for padded in device.shapes_with_groups if padded.n >= shape.n)
            shape = next(fitting, device.finder.shape(shape.n))
        padding = (device.padding_row, device.pool.padding_block)
        inputs = pack(plan, shape, *padding, self.S_if_given, groups or ())
        return PackedPlan(plan, shape, indices, inputs)

    def padded_shape(self, plan: Plan) -> StepShape:
        """
        Return the smallest padded shape that a plan fits into. If the plan does not fit into any,
        return its own shape with only the decodes padded, or with no padding if steps are never
        padded.
        """
        # each decode takes a row, and so does each guess
        n = len(plan.decodes) + sum(map(len, plan.guesses.values()))
        C = len(plan.chunks)
        T = sum(m for _, m in plan.chunks)
        for shape in self.device.shapes:  # smallest first
            if shape.n >= n and shape.C >= C and shape.T >= T:
                return shape
        if n and self.device.shapes:
            n = min(shape.n for shape in self.device.shapes if shape.n >= n)
        return StepShape(n, C, T)

    def wait_for(self, launched: Launched) -> dict[Request, list[int]]:
        """
        Wait until a step is done. Returns the sampled tokens of each request in plan.sampled. A
        request with guesses gets one more token than it has guesses: one for each guessed position,
        whether or not the guess is right, and one after the last guess. A token is NO_TOKEN if its
        logits are not numbers.
        """
        if launched.done:
            launched.done.synchronize()
        plan = launched.packed.plan
        computed = launched.on_host.tolist()
        # `computed` is longer than the list of decodes: padding and chunks come after them
        tokens = {r: [token] for r, token in zip(plan.decodes, computed)}  # noqa: B905
        if plan.guesses:
            for request, start in launched.token_indices().items():
                tokens[request] = computed[start : start + plan.num_sampled(request)]
        for request, index in zip(plan.prefilled, launched.packed.prefilled_indices, strict=True):
            tokens[request] = [computed[index]]
        return tokens
