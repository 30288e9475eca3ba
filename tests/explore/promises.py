"""The published promises, each as a program that checks itself in whatever order it runs."""

from __future__ import annotations

from collections.abc import Mapping

from asynchooks.data import WhenStale

from . import inputs, sessions
from .training import Boom, Program

PROMISES: Mapping[str, Program] = {
    **{f"exact stop, {n} workers": sessions.exact_stop(n) for n in (1, 2, 3, 4)},
    "exact stop, strides": sessions.exact_stop(2, stride=2),
    "waits end": sessions.waits_end,
    "waits are left": sessions.waits_that_are_left_leave_nothing,
    "a relay": sessions.a_relay_goes_on,
    "waits in vain": sessions.waits_in_vain_end,
    "exclusive side": sessions.no_step_runs_beside_the_exclusive_side(has_limit=True),
    "exclusive side, no limit": sessions.no_step_runs_beside_the_exclusive_side(has_limit=False),
    "evaluations": sessions.evaluations_are_alone,
    "values carry their step": sessions.values_carry_their_step,
    "one stops all": sessions.one_stops_all,
    "late, after a stop of all": sessions.a_stop_of_all_reaches_late_sessions(by_hook=False),
    "late, after a hook's stop": sessions.a_stop_of_all_reaches_late_sessions(by_hook=True),
    "a stop ends runs": sessions.a_stop_ends_every_wait("item", "step"),
    "a stop ends a ticket's wait": sessions.a_stop_ends_every_wait("exclusive", "status"),
    "a stop ends side tasks": sessions.a_stop_ends_every_wait("coordinator", "side task"),
    "leaving waits for a run": sessions.leaving_waits_for_a_run_of_another_task(None),
    "an error waits for a run": sessions.leaving_waits_for_a_run_of_another_task(Boom()),
    "early stopping": sessions.early_stopping_stops_all,
    "first error leaves": sessions.first_error_leaves,
    "errors leave": sessions.errors_leave_as_themselves,
    "moments": sessions.hooks_see_their_moments_in_order,
    "side tasks end": sessions.side_tasks_end_with_their_session,
    "side task fails": sessions.errors_of_side_tasks_end_training,
    "who opens first restores": sessions.who_opens_first_restores,
    "late restore, at once": sessions.late_restores_are_refused(0.0),
    "late restore, in a step": sessions.late_restores_are_refused(0.5),
    "late restore, at a step": sessions.late_restores_are_refused(1.0),
    "the last one closes": sessions.the_last_one_closes,
    "lost sessions": sessions.lost_sessions_are_replaced_once,
    "sessions lost twice": sessions.stops_are_exact_though_sessions_are_lost,
    "steps on a lost machine": sessions.steps_on_a_lost_machine_do_not_count,
    "stop of a block, then lost": sessions.stops_stand_though_a_session_is_lost("block"),
    "stop of a hook, then lost": sessions.stops_stand_though_a_session_is_lost("hook"),
    "side task fails, then lost": sessions.stops_stand_though_a_session_is_lost("side task"),
    "checkpoints and metrics": sessions.checkpoints_are_of_one_step_and_have_its_metric(False),
    "checkpoints in background": sessions.checkpoints_are_of_one_step_and_have_its_metric(True),
    "no bad model": sessions.no_bad_model_is_saved,
    "best model": sessions.the_best_model_is_brought_back,
    "protocol": sessions.workers_stay_within_the_bound_of_their_protocol,
    "each item once": inputs.each_item_once,
    "input ends": inputs.input_ends_for_all_workers,
    "items wait for a restore": inputs.items_wait_for_a_late_restore,
    "loops over batches": inputs.loops_share_their_batches,
    "passes": inputs.passes_end_once,
    "resources": inputs.resources_are_made_and_deleted_whole,
    "takers": inputs.takers_wait_for_one_stage,
    "maps": inputs.maps_keep_items_and_their_order,
    "a map fails": inputs.a_map_fails_behind_its_results,
    "rollouts within their bound": inputs.rollouts_stay_within_their_bound(1, WhenStale.WAIT),
    "rollouts of two learners": inputs.rollouts_stay_within_their_bound(2, WhenStale.WAIT),
    "rollouts that are dropped": inputs.rollouts_stay_within_their_bound(2, WhenStale.DROP),
}
