/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's chance: random numbers from the hub's seed, faults from rules or
 * from the profile's chances, planted bugs, and the trace that makes two runs
 * of a seed comparable.
 *
 * Every post draws exactly the same count of numbers whatever comes out, so a
 * rule added to a script does not shift the delays of all that follows.
 */
#include "tests/sim/fake_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define LATE_NS (200 * LOOP_NS_PER_MS)
#define SLOW_FACTOR 100u

struct rule {
	struct list link;
	struct fake_rule rule;
	unsigned int seen, applied;
};

/* splitmix64: one word of state, passes the usual tests */
uint64_t fake_rand(struct fake_hub *hub)
{
	uint64_t z = hub->rng += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

uint64_t fake_between(struct fake_hub *hub, uint64_t min, uint64_t max)
{
	uint64_t n = fake_rand(hub);

	return max <= min ? min : min + n % (max - min + 1);
}

int fake_script(struct fake_hub *hub, const struct fake_rule *rule)
{
	struct rule *entry = mem_zalloc(sizeof(*entry));

	if (!entry)
		return err_pass(-ENOMEM);
	entry->rule = *rule;
	list_push_back(&hub->rules, &entry->link);
	return 0;
}

static void rule_free(struct rule *rule)
{
	list_remove(&rule->link);
	mem_free(rule);
}

void fake_hub_spare(struct fake_hub *hub, uint8_t first)
{
	hub->spared = first;
}

void fake_script_clear(struct fake_hub *hub)
{
	struct rule *rule;

	list_foreach_safe(rule, &hub->rules, link)
		rule_free(rule);
}

void fake_script_forget(struct fake_hub *hub, const struct fake_node *node)
{
	struct rule *rule;

	list_foreach_safe(rule, &hub->rules, link) {
		if (rule->rule.from == &node->net.base ||
		    rule->rule.to == &node->net.base)
			rule_free(rule);
	}
}

static bool is_local(enum fake_fault fault)
{
	return fault == FAKE_NOMEM_REG || fault == FAKE_NOMEM_KEY;
}

/* It fits: count it, and say whether its turn has come. */
static bool rule_take(struct rule *rule)
{
	if (rule->seen++ < rule->rule.skip)
		return false;
	if (rule->rule.times && rule->applied >= rule->rule.times)
		return false;
	rule->applied++;
	return true;
}

static bool rule_fits(const struct fake_rule *rule, const struct fake_node *from,
		      const struct fake_node *to, enum xp_kind kind)
{
	return (!rule->from || rule->from == &from->net.base) &&
	       (!rule->to || rule->to == &to->net.base) &&
	       (!rule->kinds || rule->kinds & (1u << kind));
}

static bool draw_rule(struct fake_hub *hub, const struct fake_node *from,
		      const struct fake_node *to, enum xp_kind kind,
		      struct fake_rule *fault_p)
{
	struct rule *rule;

	list_foreach(rule, &hub->rules, link) {
		if (is_local(rule->rule.fault) ||
		    !rule_fits(&rule->rule, from, to, kind) || !rule_take(rule))
			continue;
		*fault_p = rule->rule;
		return true;
	}
	return false;
}

static void draw_chance(const struct fake_profile *profile, uint64_t dice, uint64_t where,
			uint64_t bytes, struct fake_rule *fault_p)
{
	const struct {
		unsigned int pm;
		enum fake_fault fault;
	} chances[] = {
		{profile->refuse_pm, FAKE_REFUSE}, {profile->nomem_pm, FAKE_NOMEM_THERE},
		{profile->error_pm, FAKE_ERROR},   {profile->stuck_pm, FAKE_STUCK},
		{profile->slow_pm, FAKE_SLOW},	   {profile->late_pm, FAKE_LATE},
		{profile->cut_pm, FAKE_CUT},
	};
	uint64_t pick = dice % 1000;

	for (size_t i = 0; i < ARRAY_LEN(chances); i++) {
		if (pick < chances[i].pm) {
			fault_p->fault = chances[i].fault;
			fault_p->at_bytes = bytes ? where % bytes : 0;
			return;
		}
		pick -= chances[i].pm;
	}
}

static bool is_spared(const struct fake_hub *hub, const struct xp_op *op)
{
	return hub->spared && op->header_len > 0 &&
	       *(const uint8_t *)op->header == hub->spared;
}

static void fault_count(struct fake_hub *hub)
{
	hub->stats.faults++;
	hub->stats.fault_ns = loop_now_ns(hub->loop);
}

void fake_fault_draw(struct fake_hub *hub, const struct fake_node *from,
		     const struct fake_node *to, const struct xp_op *op,
		     struct fake_rule *fault_p)
{
	const struct fake_profile *profile = fake_profile_of(hub, from, to);
	uint64_t dice = fake_rand(hub), where = fake_rand(hub);
	struct fake_profile line = {.refuse_pm = profile->refuse_pm,
				    .nomem_pm = profile->nomem_pm,
				    .cut_pm = profile->cut_pm};

	memset(fault_p, 0, sizeof(*fault_p));
	if (is_spared(hub, op))
		draw_chance(&line, dice, where, 0, fault_p);
	else if (!draw_rule(hub, from, to, op->kind, fault_p))
		draw_chance(profile, dice, where,
			    op->sides.plan ? op->sides.plan->bytes : 0, fault_p);
	if (!fault_p->fault)
		return;
	if (!fault_p->extra_ns)
		fault_p->extra_ns = LATE_NS;
	if (!fault_p->factor)
		fault_p->factor = SLOW_FACTOR;
	fault_count(hub);
}

bool fake_fault_local(struct fake_hub *hub, enum fake_fault fault,
		      const struct fake_node *node)
{
	struct rule *rule;

	list_foreach(rule, &hub->rules, link) {
		if (rule->rule.fault == fault &&
		    (!rule->rule.from || rule->rule.from == &node->net.base) &&
		    rule_take(rule)) {
			fault_count(hub);
			return true;
		}
	}
	return false;
}

void fake_plant(struct fake_hub *hub, enum fake_bug bug)
{
	hub->bug = bug;
	hub->bug_spent = false;
}

bool fake_bug_once(struct fake_hub *hub, enum fake_bug bug)
{
	if (hub->bug != bug || hub->bug_spent)
		return false;
	hub->bug_spent = true;
	return true;
}

const char *fake_bug_name(enum fake_bug bug)
{
	static const char *const names[FAKE_BUG_COUNT] = {
		[FAKE_BUG_NONE] = "none",
		[FAKE_BUG_SLICE_AFTER_DONE] = "slice-after-done",
		[FAKE_BUG_REVOKE_IGNORED] = "revoke-ignored",
		[FAKE_BUG_LOST_WRITES] = "lost-writes",
		[FAKE_BUG_DONE_SHORT] = "done-short",
		[FAKE_BUG_REQUESTS_SWAPPED] = "requests-swapped",
		[FAKE_BUG_BYTE_FLIPPED] = "byte-flipped",
		[FAKE_BUG_BYTE_STRAY] = "byte-stray",
		[FAKE_BUG_SOURCE_STALE] = "source-stale",
		[FAKE_BUG_WORDS_LOST] = "words-lost",
		[FAKE_BUG_TOKEN_UNCHECKED] = "token-unchecked",
	};

	return (unsigned int)bug < FAKE_BUG_COUNT ? names[bug] : "none";
}

/* ---- trace ---- */

uint64_t fake_digest(const struct fake_hub *hub)
{
	return hub->digest;
}

void fake_hub_trace(struct fake_hub *hub, void (*on_event)(void *arg, const char *words),
		    void *arg)
{
	hub->on_event = on_event;
	hub->on_event_arg = arg;
}

/* FNV-1a over the event's own bytes: no pointer, nothing of the machine. */
static void digest_add(struct fake_hub *hub, uint64_t n)
{
	for (unsigned int i = 0; i < 8; i++) {
		hub->digest ^= (n >> (8 * i)) & 0xff;
		hub->digest *= UINT64_C(0x100000001b3);
	}
}

void fake_trace(struct fake_hub *hub, const struct fake_node *from,
		const struct fake_node *to, uint64_t xfer, const char *words,
		uint64_t number)
{
	char line[128];

	digest_add(hub, loop_now_ns(hub->loop));
	digest_add(hub, from ? from->id : UINT32_MAX);
	digest_add(hub, to ? to->id : UINT32_MAX);
	digest_add(hub, xfer);
	digest_add(hub, number);
	for (const char *s = words; *s; s++)
		digest_add(hub, (unsigned char)*s);
	if (!hub->on_event)
		return;
	snprintf(line, sizeof(line), "%llu us n%d->n%d #%llu %s %llu",
		 (unsigned long long)(loop_now_ns(hub->loop) / 1000),
		 from ? (int)from->id : -1, to ? (int)to->id : -1,
		 (unsigned long long)xfer, words, (unsigned long long)number);
	hub->on_event(hub->on_event_arg, line);
}
