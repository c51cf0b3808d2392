"""What would happen to a Generate: the same steps, and nothing sent to a worker."""

from __future__ import annotations

from dataclasses import replace

from router.fleet.worker import Worker
from router.media.intake import MediaIntake
from router.policy.base import Policy, RoutingView
from router.request.decide import Decided
from router.request.pair import LEGS
from router.request.pipeline import Pipeline, view_of
from router.request.prepared import Prepared
from router.request.record import Record
from router.request.select import Judgement, pick
from router.request.show import show_load
from router.wire import admin, engine


class Explainer:
    """Runs the pipeline's own steps up to the choice of a worker."""

    def __init__(self, pipeline: Pipeline, intake: MediaIntake) -> None:
        self._pipeline = pipeline
        self._intake = intake

    async def explain(self, request: engine.GenerateRequest) -> admin.ExplainResponse:
        """Raises the `Fault` that the request itself would meet before it is dispatched.

        Media that the router would process are fetched and processed.
        """
        # Stripping for the wire drops what is to be shown.
        anchors, routing_key = len(request.tokenized.input_ids), request.router.routing_key
        record = Record(request_id=request.request_id)
        decided = self._pipeline.decider.decide(request, "", record)
        with self._intake.ticket() as ticket:
            prepared = await self._pipeline.prepare(request, decided, ticket)
        constraint = self._pipeline.decider.constraint(decided, prepared)
        dispatcher = self._pipeline.dispatcher
        pairs = self._pipeline.pairs
        view = view_of(decided, prepared, routing_key)
        policy = dispatcher.policies.of(decided.model)
        paired = decided.served.pairs
        if paired and (alone := pairs.alone(constraint, view, request.sampling_params)):
            constraint, paired = alone, False
        surveys = pairs.pairing.surveys(constraint) if paired else (dispatcher.survey(constraint),)
        shown = admin.ExplainResponse(
            model=decided.model,
            items=_items(decided, prepared),
            mode=decided.resolution.mode.value,
            reason=_reason(decided, record),
            constraint=(
                replace(constraint, roles=frozenset(LEGS)) if paired else constraint
            ).lines(),
            workers=[
                _worker(judgement, dispatcher.now())
                for seen in surveys
                for judgement in seen.judgements
            ],
            policy=policy.name,
            prompt_tokens=anchors,
            estimated_tokens=prepared.prompt_tokens,
            prefixes=dispatcher.policies.prefix_verdict(
                decided.model, prefix_credit=view.prefix_credit
            ),
        )
        if paired:
            shown.picked = pairs.would_pick(constraint, view)
        elif candidates := surveys[0].admissible:
            shown.picked = candidates[pick(policy, view, candidates)].address
        # Of a pair the policy chooses the prefill leg.
        _add_opinions(shown, policy, view, surveys[0].admissible)
        return shown


def _reason(decided: Decided, record: Record) -> str:
    reason = decided.resolution.why.value
    if record.override_ignored:
        reason += "; router.mm_processing is ignored without --allow-mm-override"
    return reason


def _add_opinions(
    shown: admin.ExplainResponse, policy: Policy, view: RoutingView, asked: list[Worker]
) -> None:
    if not asked:
        return
    found = {
        worker.address: opinion
        for worker, opinion in zip(asked, policy.opinions(view, asked), strict=True)
    }
    for entry in shown.workers:
        opinion = found.get(entry.address)
        if opinion is None:
            continue
        if opinion.cost is not None:
            entry.cost = opinion.cost
        if opinion.matched_blocks is not None:
            entry.matched_blocks = opinion.matched_blocks


def _items(decided: Decided, prepared: Prepared) -> list[admin.ExplainedItem]:
    shown = []
    for item in decided.plan.items:
        blocker = item.blocker
        entry = admin.ExplainedItem(
            index=item.index,
            modality=item.modality,
            source=item.scheme,
            forwardable=blocker is None,
            why_not=blocker.value if blocker else "",
        )
        if item.index < len(prepared.items):
            about = prepared.items[item.index]
            entry.width, entry.height, entry.tokens = about.width, about.height, about.tokens
        shown.append(entry)
    return shown


def _worker(judgement: Judgement, now: float) -> admin.ExplainedWorker:
    cause = judgement.cause or judgement.absence
    return admin.ExplainedWorker(
        address=judgement.worker.address,
        admitted=cause is None,
        cause=cause.value if cause else "",
        load=show_load(judgement.worker, now),
    )
