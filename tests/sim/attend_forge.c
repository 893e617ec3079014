/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hostile peer of query rows: what it says comes as from a daemon that is up, and is
 * a message of the past (again, or as from another daemon, or with one number changed),
 * an answer that nobody computed, a stop that is not its own, an echo or a speed.
 *
 * Numbers of ATTENDs tell whose they are: a requester's own begin at 1, those of
 * strangers and of changed ones stand far above, so no post of ours is meant by their
 * answers.
 */
#include "tests/sim/attend.h"

#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/attend/calibrate.h"
#include "daemon/handshake/handshake.h"

#define KEPT 32u
#define CHANGED (2 * ASK_STRANGERS)

static struct sim_kept past[KEPT];
static unsigned int past_count;
static uint64_t forged;

void ask_forge_begin(void)
{
	past_count = 0;
	forged = 0;
}

static int pass(struct sim *sim, struct kvd *kvd, struct remote *remote,
		const struct wire_header *h, struct cursor *body)
{
	struct cursor again = *body;
	int r;

	ask_judge_before(sim, kvd, remote, h, again);
	r = sim_past_pass(kvd, remote, h, body);
	ask_judge_after(sim, kvd, remote, h, again);
	return r;
}

int sim_ask_message(struct sim *sim, struct kvd *kvd, struct remote *remote,
		    const struct wire_header *h, struct cursor *body)
{
	past_count += sim_past_keep(&past[past_count % KEPT], kvd, remote, h, body);
	return pass(sim, kvd, remote, h, body);
}

static void say(struct sim *sim, struct kvd *kvd, struct remote *remote,
		unsigned int type, const void *bytes, size_t len)
{
	const struct wire_header h = {.type = (uint16_t)type};
	struct cursor body;

	cursor_read(&body, bytes, len);
	if (pass(sim, kvd, remote, &h, &body) < 0)
		err_clear(); /* on a line it would have been the end of it */
}

/* ---- the past ---- */

static const struct sim_kept *any_kept(struct sim *sim, struct sim_draw *d,
				       unsigned int type)
{
	unsigned int have = past_count < KEPT ? past_count : KEPT;
	unsigned int from = have ? sim_below(d, have) : 0;

	for (unsigned int i = 0; i < have; i++) {
		const struct sim_kept *kept = &past[(from + i) % have];

		if ((!type || kept->header.type == type) &&
		    sim_past_still_there(sim, kept))
			return kept;
	}
	return NULL;
}

static bool again(struct sim *sim, struct sim_draw *d)
{
	const struct sim_kept *kept = any_kept(sim, d, 0);

	if (kept)
		say(sim, kept->kvd, kept->remote, kept->header.type, kept->body,
		    kept->len);
	return kept != NULL;
}

static void put_u64(uint8_t *at, uint64_t value)
{
	struct cursor out;

	cursor_write(&out, at, sizeof(value));
	cursor_put_u64(&out, value);
}

static void lied(const struct leg *leg)
{
	for (unsigned int p = 0; p < SIM_PLACES_MAX; p++) {
		if (asks.requesters[p].alive &&
		    asks.requesters[p].session == leg->post->attend->session)
			asks.requesters[p].posts[leg->post->seat].lied = true;
	}
}

/* Rows that this daemon wants, as the daemon of `remote` numbers them: what it stops is
 * its own. */
static void stopped_by_itself(struct sim *sim, const struct remote *remote,
			      const struct sim_kept *kept)
{
	struct wire_attention_cancel msg;
	struct cursor body;

	cursor_read(&body, kept->body, kept->len);
	if (wire_attention_cancel_get(&body, &msg) < 0)
		return;
	for (unsigned int p = 0; p < sim->script->places; p++) {
		const struct kvd *other = sim_kvd(sim, p);
		const struct leg *leg = idmap_get(&attends_of(other)->legs, msg.attend);

		if (leg && leg->post &&
		    memcmp(peers_instance(other->peers), remote->peer->instance, 16) ==
			    0 &&
		    memcmp(peers_instance(kept->kvd->peers), leg->remote->peer->instance,
			   16) == 0)
			lied(leg);
	}
}

/* As from another daemon. Its answer must not be one, its stop stops no rows but its own,
 * and rows with chunks of another's hold are refused. */
static bool from_another(struct sim *sim, struct sim_draw *d)
{
	const struct sim_kept *kept = any_kept(sim, d, 0);
	struct remote *remote = kept ? sim_past_remote(kept->kvd, d) : NULL;
	uint8_t body[SIM_KEPT_BYTES];

	if (!remote || remote == kept->remote)
		return false;
	memcpy(body, kept->body, kept->len);
	if (kept->header.type == WIRE_T_ATTEND)
		put_u64(body, ASK_STRANGERS + forged++);
	else if (kept->header.type == WIRE_T_ATTENTION_CANCEL)
		stopped_by_itself(sim, remote, kept);
	say(sim, kept->kvd, remote, kept->header.type, body, kept->len);
	return true;
}

static void number_change(struct sim_draw *d, struct wire_attend *msg)
{
	uint32_t *const numbers[] = {&msg->first, &msg->count, &msg->layer,
				     &msg->rows,  &msg->delta, &msg->per_token};
	uint32_t *n = numbers[sim_below(d, ARRAY_LEN(numbers))];
	static const uint32_t odd[] = {0, 1, 7, 8, 4096, 4097, 1u << 31, UINT32_MAX};

	*n = sim_chance(d, 50) ? odd[sim_below(d, ARRAY_LEN(odd))] : *n + sim_below(d, 5);
}

/* One thing of it is not as it was. */
static bool changed(struct sim *sim, struct sim_draw *d)
{
	const struct sim_kept *kept = any_kept(sim, d, WIRE_T_ATTEND);
	struct wire_attend msg;
	uint8_t buf[2 * SIM_KEPT_BYTES], bytes[SIM_KEPT_BYTES];
	struct cursor body, out;

	if (!kept)
		return false;
	cursor_read(&body, kept->body, kept->len);
	if (wire_attend_get(&body, &msg) < 0 || msg.count == 0)
		return false;
	msg.attend = CHANGED + forged++;
	switch (sim_below(d, 8)) {
	case 0:
		msg.ask = sim_next(d);
		break;
	case 1:
		msg.pool = sim_below(d, 8);
		break;
	case 2:
		msg.q.len -= 1 + sim_below(d, (unsigned int)msg.q.len);
		break;
	case 3:
		msg.select.len ^= 4; /* what lies there is q, or read before */
		msg.select.data = msg.q.data;
		break;
	case 4:
		memcpy(bytes, msg.form.data, msg.form.len);
		bytes[sim_below(d, (unsigned int)msg.form.len)] ^=
			(uint8_t)(1u << sim_below(d, 8));
		msg.form.data = bytes;
		break;
	case 5:
		msg.tokens = sim_chance(d, 50) ? 0 : UINT64_MAX - sim_below(d, 3);
		break;
	default:
		number_change(d, &msg);
	}
	cursor_write(&out, buf, sizeof(buf));
	wire_attend_put(&out, &msg);
	if (out.bad)
		return false;
	say(sim, kept->kvd, kept->remote, WIRE_T_ATTEND, buf, out.pos);
	return true;
}

/* ---- answers ---- */

static struct leg *any_leg(const struct kvd *kvd, struct sim_draw *d)
{
	unsigned int seen = 0;
	struct leg *found = NULL;
	struct idmap_cursor it;

	idmap_foreach(&attends_of(kvd)->legs, it) {
		struct leg *leg = it.value;

		if (leg->post && leg->sent && sim_below(d, ++seen) == 0)
			found = leg;
	}
	return found;
}

/* Of rows that are under way: by who was asked, who may say anything, or by another. */
static bool answered(struct sim *sim, struct sim_draw *d)
{
	struct kvd *kvd = sim_kvd(sim, sim_below(d, sim->script->places));
	struct leg *leg = any_leg(kvd, d);
	struct remote *remote = leg ? leg->remote : NULL;
	struct wire_attention_result msg = {.text = "a lie"};
	uint8_t buf[SIM_KEPT_BYTES], values[ASK_ROWS * (ASK_DIMS + 2) * 4 + 8];
	bool wrong = sim_chance(d, 40);
	struct cursor out;

	if (leg && sim_chance(d, 50))
		remote = sim_past_remote(kvd, d);
	if (!remote)
		return false;
	msg.attend = leg->number;
	memset(values, 0x3f, sizeof(values)); /* 0.75 */
	msg.values.data = values;
	msg.values.len = leg->rows * (ASK_DIMS + 2) * 4;
	if (wrong)
		msg.values.len -= sim_chance(d, 50) ? msg.values.len : (size_t)-4;
	else if (sim_chance(d, 40))
		msg.code =
			sim_chance(d, 50) ? 1 + sim_below(d, 40) : (uint32_t)sim_next(d);
	/* values of a wrong length are not believed by anybody */
	if (remote == leg->remote && (!wrong || msg.code))
		lied(leg);
	cursor_write(&out, buf, sizeof(buf));
	wire_attention_result_put(&out, &msg);
	if (out.bad)
		return false;
	say(sim, kvd, remote, WIRE_T_ATTENTION_RESULT, buf, out.pos);
	return true;
}

/* ---- echoes ---- */

static bool echo(struct sim *sim, struct sim_draw *d)
{
	struct kvd *kvd = sim_kvd(sim, sim_below(d, sim->script->places));
	struct remote *remote = sim_past_remote(kvd, d);
	struct wire_attend msg = {.attend = CALIBRATE_FIRST + sim_below(d, 8)};
	const struct wire_attention_result told = {.attend = msg.attend,
						   .values = {.data = past, .len = 40}};
	const struct sim_kept *kept = any_kept(sim, d, WIRE_T_ATTEND);
	struct wire_attend real;
	uint8_t buf[SIM_KEPT_BYTES];
	struct cursor out, body;

	if (!remote)
		return false;
	cursor_write(&out, buf, sizeof(buf));
	if (sim_chance(d, 30)) {
		wire_attention_result_put(&out, &told);
		say(sim, kvd, remote, WIRE_T_ATTENTION_RESULT, buf, out.pos);
		return true;
	}
	msg.q.data = past;
	msg.q.len = sim_below(d, 600);
	if (kept && sim_chance(d, 10)) { /* a speed, of a true form */
		cursor_read(&body, kept->body, kept->len);
		if (wire_attend_get(&body, &real) >= 0)
			msg.form = real.form;
	} else if (sim_chance(d, 20)) {
		msg.form.data = past;
		msg.form.len = sim_below(d, 60);
	}
	wire_attend_put(&out, &msg);
	if (out.bad)
		return false;
	say(sim, kvd, remote, WIRE_T_ATTEND, buf, out.pos);
	return true;
}

bool ask_forge(struct sim *sim, struct sim_draw *d)
{
	switch (sim_below(d, 6)) {
	case 0:
		return again(sim, d);
	case 1:
		return from_another(sim, d);
	case 2:
		return changed(sim, d);
	case 3:
		return echo(sim, d);
	default:
		return answered(sim, d);
	}
}
