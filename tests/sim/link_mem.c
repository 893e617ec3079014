/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hub knows its nodes (one a link), its lines and its path rules, each in a
 * list: hubs are small and the order of a list is the same in every run.
 *
 * A line lives in the hub, not in its node: when the node hangs up or dies, the
 * frames that it had sent are still on their way, so the line stays without an
 * owner until it is empty. A line that is not connected refuses frames, as a
 * ZeroMQ socket with ZMQ_IMMEDIATE does.
 *
 * Callbacks run only from timers and deferred calls, never from inside dial,
 * send or hangup; a callback may hang up any line and free any link, so the
 * code touches nothing after it.
 */
#include "tests/sim/link_mem.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/base/mem.h"
#include "daemon/base/idmap.h"
#include "daemon/loop/loop.h"

#define QUEUE_MAX_DEFAULT 1000u
#define PPM 1000000u

struct mem_rule {
	struct list link;
	char from[LINK_ENDPOINT_MAX], to[LINK_ENDPOINT_MAX];
	struct mem_path path;
};

struct mem_alias {
	struct list link;
	char name[LINK_ENDPOINT_MAX], endpoint[LINK_ENDPOINT_MAX];
};

struct mem_node {
	struct link link;
	struct list in_hub;
	struct mem_hub *hub;
	char user[LINK_USER_MAX];
	bool crashed, frozen;
	uint64_t frames; /* sent by it and delivered to it */
};

struct mem_hub {
	struct loop *loop;
	struct list nodes, lines, rules, aliases;
	struct strmap living; /* struct mem_node by endpoint */
	struct mem_path fallback;
	unsigned int queue_max;
	struct mem_stats stats;
	/* what lines to a machine without power are connected to */
	struct mem_node grave;
};

struct mem_frame {
	struct list link;
	uint64_t at_ns;
	size_t len;
	uint8_t data[];
};

struct link_line {
	struct list in_hub;
	struct mem_hub *hub;
	struct mem_node *from; /* NULL: hung up, frames still in flight */
	struct mem_node *to;   /* NULL: not connected */
	void *owner;
	char from_endpoint[LINK_ENDPOINT_MAX], to_endpoint[LINK_ENDPOINT_MAX];
	char user[LINK_USER_MAX];
	struct list frames;
	unsigned int count;
	uint64_t last_ns; /* arrival of the newest frame: order is kept */
	bool reported;	  /* what on_line said last */
	struct loop_timer deliver, connect;
	struct loop_defer report, trouble;
};

/* ---- paths ---- */

static struct mem_rule *rule_find(const struct mem_hub *hub, const char *from,
				  const char *to)
{
	struct mem_rule *rule;

	list_foreach(rule, &hub->rules, link) {
		if (strcmp(rule->from, from) == 0 && strcmp(rule->to, to) == 0)
			return rule;
	}
	return NULL;
}

static const struct mem_path *path_of(const struct mem_hub *hub, const char *from,
				      const char *to)
{
	const struct mem_rule *rule = rule_find(hub, from, to);

	return rule ? &rule->path : &hub->fallback;
}

static const struct mem_path *line_path(const struct link_line *line)
{
	return path_of(line->hub, line->from_endpoint, line->to_endpoint);
}

static struct mem_node *node_find(const struct mem_hub *hub, const char *endpoint)
{
	struct mem_alias *alias;

	list_foreach(alias, &hub->aliases, link) {
		if (strcmp(alias->name, endpoint) == 0)
			endpoint = alias->endpoint;
	}
	return strmap_get(&hub->living, endpoint);
}

/* Nothing connects to it any more. */
static void node_die(struct mem_node *node)
{
	if (!node->crashed)
		strmap_remove(&node->hub->living, node->link.endpoint);
	node->crashed = true;
}

/* ---- lines ---- */

static void frames_drop(struct link_line *line, unsigned int keep)
{
	while (line->count > keep) {
		struct mem_frame *frame =
			list_entry(line->frames.prev, struct mem_frame, link);

		list_remove(&frame->link);
		mem_free(frame);
		line->count--;
		line->hub->stats.lost++;
	}
}

static void line_free(struct link_line *line)
{
	frames_drop(line, 0);
	loop_timer_stop(&line->deliver);
	loop_timer_stop(&line->connect);
	loop_defer_cancel(&line->report);
	loop_defer_cancel(&line->trouble);
	list_remove(&line->in_hub);
	mem_free(line);
}

static void on_deliver(struct loop_timer *timer);

/* Look at the queue's head again. */
static void line_kick(struct link_line *line)
{
	const struct mem_frame *head = list_first(&line->frames, struct mem_frame, link);
	uint64_t now_ns = loop_now_ns(line->hub->loop);

	if (!head || line_path(line)->cut || (line->to && line->to->frozen))
		return;
	loop_timer_start(&line->deliver, head->at_ns > now_ns ? head->at_ns - now_ns : 0);
}

static void line_report(struct link_line *line)
{
	if (line->from && line->reported != (line->to != NULL))
		loop_defer(line->hub->loop, &line->report);
}

static void on_report(struct loop_defer *defer)
{
	struct link_line *line = container_of(defer, struct link_line, report);
	struct link *link;

	if (!line->from || line->from->crashed || line->reported == (line->to != NULL))
		return;
	link = &line->from->link;
	line->reported = line->to != NULL;
	if (link->on_line)
		link->on_line(link->owner, line->owner, line->reported);
}

/* Nobody is there, or a key is wrong. */
static void on_mem_trouble(struct loop_defer *defer)
{
	struct link_line *line = container_of(defer, struct link_line, trouble);
	bool refused = line_path(line)->refuse;
	struct link *link;
	struct err why;

	if (!line->from || line->from->crashed || line->from->frozen || line->to)
		return;
	link = &line->from->link;
	if (refused)
		err_set(&why, ERR_AUTH, "refuses our key");
	else
		err_set(&why, ERR_PEER, "cannot be reached: nobody listens");
	if (link->on_diagnosis)
		link->on_diagnosis(link->owner, line->owner, &why, refused);
}

/* Try to connect: a round trip, when there is somebody and a way both ways. */
static void line_connect(struct link_line *line)
{
	const struct mem_hub *hub = line->hub;
	const struct mem_path *there = line_path(line);
	const struct mem_path *back =
		path_of(hub, line->to_endpoint, line->from_endpoint);

	if (line->to || !line->from || line->from->crashed || there->cut || back->cut ||
	    loop_timer_running(&line->connect))
		return;
	if (there->refuse || !node_find(hub, line->to_endpoint)) {
		loop_defer(hub->loop, &line->trouble);
		return;
	}
	loop_timer_start(&line->connect, there->delay_ns + back->delay_ns);
}

static void on_connect(struct loop_timer *timer)
{
	struct link_line *line = container_of(timer, struct link_line, connect);

	if (line->to || !line->from || line->from->crashed || line_path(line)->cut)
		return;
	line->to = node_find(line->hub, line->to_endpoint);
	line_report(line);
}

static struct link_line *line_alloc(struct mem_hub *hub, const char *from,
				    const char *user, const char *to)
{
	struct link_line *line = mem_zalloc(sizeof(*line));

	if (!line)
		return NULL;
	line->hub = hub;
	snprintf(line->from_endpoint, sizeof(line->from_endpoint), "%s", from);
	snprintf(line->to_endpoint, sizeof(line->to_endpoint), "%s", to);
	snprintf(line->user, sizeof(line->user), "%s", user);
	list_init(&line->frames);
	loop_timer_init(&line->deliver, hub->loop, on_deliver);
	loop_timer_init(&line->connect, hub->loop, on_connect);
	loop_defer_init(&line->report, on_report);
	loop_defer_init(&line->trouble, on_mem_trouble);
	list_push_back(&hub->lines, &line->in_hub);
	return line;
}

/* Frames of a connection that is no more travel on, on a line of their own. */
static void line_split(struct link_line *line)
{
	struct link_line *old =
		line_alloc(line->hub, line->from_endpoint, line->user, line->to_endpoint);
	struct list *frame;

	if (!old) {
		frames_drop(line, 0);
		return;
	}
	while ((frame = list_pop_front(&line->frames)))
		list_push_back(&old->frames, frame);
	old->count = line->count;
	old->to = line->to;
	line->count = 0;
	line_kick(old);
}

/* Break a connected line: its first `keep` frames still arrive. */
static void line_break(struct link_line *line, unsigned int keep)
{
	frames_drop(line, keep);
	loop_timer_stop(&line->deliver);
	if (line->count)
		line_split(line);
	line->to = NULL;
	line_report(line);
	line_connect(line);
}

static void on_deliver(struct loop_timer *timer)
{
	struct link_line *line = container_of(timer, struct link_line, deliver);
	struct mem_frame *frame = list_first(&line->frames, struct mem_frame, link);
	struct link_frame out = {.data = NULL};
	struct mem_node *to = line->to;

	if (line_path(line)->cut || (to && to->frozen))
		return; /* kicked when that ends */
	list_remove(&frame->link);
	line->count--;
	memcpy(out.user, line->user, sizeof(out.user));
	if (line->count)
		line_kick(line);
	else if (!line->from)
		line_free(line);
	if (to && !to->crashed && to->link.on_frame) {
		to->hub->stats.delivered++;
		to->frames++;
		out.data = frame->data;
		out.len = frame->len;
		to->link.on_frame(to->link.owner, &out);
	}
	mem_free(frame);
}

/* ---- the link's operations ---- */

static int mem_dial(struct link *link, const char *endpoint, void *owner,
		    struct link_line **line_p)
{
	struct mem_node *node = container_of(link, struct mem_node, link);
	struct link_line *line =
		line_alloc(node->hub, link->endpoint, node->user, endpoint);

	if (!line)
		return err_pass(-ENOMEM);
	line->from = node;
	line->owner = owner;
	line_connect(line);
	*line_p = line;
	return 0;
}

static void mem_hangup(struct link_line *line)
{
	line->from = NULL;
	line->owner = NULL;
	loop_timer_stop(&line->connect);
	loop_defer_cancel(&line->report);
	loop_defer_cancel(&line->trouble);
	if (!line->count)
		line_free(line);
}

static int mem_send(struct link_line *line, const void *frame, size_t len)
{
	struct mem_hub *hub = line->hub;
	const struct mem_path *path = line_path(line);
	uint64_t at_ns = loop_now_ns(hub->loop) + path->delay_ns;
	struct mem_frame *copy;

	if (!line->to || line->from->frozen || line->count >= hub->queue_max) {
		hub->stats.refused++;
		return err_raise(ERR_LIMIT, "line to %s: %s", line->to_endpoint,
				 line->to ? "its queue is full" : "not connected");
	}
	copy = mem_zalloc(sizeof(*copy) + len);
	if (!copy)
		return err_pass(-ENOMEM);
	if (path->jitter_ns)
		at_ns += loop_random_u64(hub->loop) % (path->jitter_ns + 1);
	if (at_ns < line->last_ns)
		at_ns = line->last_ns;
	copy->at_ns = line->last_ns = at_ns;
	copy->len = len;
	memcpy(copy->data, frame, len);
	list_push_back(&line->frames, &copy->link);
	hub->stats.sent++;
	line->from->frames++;
	line->count++;
	if (!loop_timer_running(&line->deliver))
		line_kick(line);
	if (path->break_ppm && loop_random_u64(hub->loop) % PPM < path->break_ppm)
		line_break(line, (unsigned int)(loop_random_u64(hub->loop) %
						(line->count + 1)));
	return 0;
}

/* The node's own lines stop; what it had sent goes on unless `lose`. */
static void node_silence(struct mem_node *node, bool lose)
{
	struct link_line *line;

	list_foreach_safe(line, &node->hub->lines, in_hub) {
		if (line->from != node)
			continue;
		if (lose)
			frames_drop(line, 0);
		loop_timer_stop(&line->connect);
		if (line->to)
			line_break(line, line->count);
	}
}

/* Lines to the node lose it; they look for another. `endpoint`: only those. */
static void node_leave(struct mem_node *node, const char *endpoint)
{
	struct link_line *line;

	list_foreach_safe(line, &node->hub->lines, in_hub) {
		if (line->to != node ||
		    (endpoint && strcmp(line->to_endpoint, endpoint) != 0))
			continue;
		if (line->from)
			line_break(line, 0);
		else
			line_free(line);
	}
}

static void mem_free_link(struct link *link)
{
	struct mem_node *node;
	struct link_line *line;

	if (!link)
		return;
	node = container_of(link, struct mem_node, link);
	node_die(node);
	node_leave(node, NULL);
	list_foreach_safe(line, &node->hub->lines, in_hub) {
		if (line->from == node)
			mem_hangup(line);
	}
	list_remove(&node->in_hub);
	mem_free(node);
}

/* One user may have several daemons. */
static bool mem_same_user(struct link *link, const char *endpoint, const char *user)
{
	const struct mem_node *node = container_of(link, struct mem_node, link);

	(void)endpoint;
	return strcmp(node->user, user) == 0;
}

static const struct link_ops mem_ops = {
	.same_user = mem_same_user,
	.dial = mem_dial,
	.hangup = mem_hangup,
	.send = mem_send,
	.free = mem_free_link,
};

/* ---- hubs, nodes and what befalls them ---- */

/* Something changed: who could not connect, or waits, tries again. */
static void hub_rescan(struct mem_hub *hub)
{
	struct link_line *line;

	list_foreach(line, &hub->lines, in_hub) {
		line_kick(line);
		line_connect(line);
	}
}

int mem_hub_new(struct loop *loop, struct mem_hub **hub_p)
{
	struct mem_hub *hub = mem_zalloc(sizeof(*hub));

	if (!hub)
		return err_pass(-ENOMEM);
	hub->loop = loop;
	hub->queue_max = QUEUE_MAX_DEFAULT;
	hub->grave = (struct mem_node){.hub = hub, .crashed = true};
	list_init(&hub->nodes);
	list_init(&hub->lines);
	list_init(&hub->rules);
	list_init(&hub->aliases);
	strmap_init(&hub->living);
	*hub_p = hub;
	return 0;
}

void mem_hub_free(struct mem_hub *hub)
{
	struct link_line *line;
	struct mem_alias *alias;
	struct mem_rule *rule;

	if (!hub)
		return;
	assert(list_empty(&hub->nodes));
	list_foreach_safe(line, &hub->lines, in_hub)
		line_free(line);
	list_foreach_safe(rule, &hub->rules, link)
		mem_free(rule);
	list_foreach_safe(alias, &hub->aliases, link)
		mem_free(alias);
	strmap_fini(&hub->living);
	mem_free(hub);
}

void mem_hub_set_default(struct mem_hub *hub, const struct mem_path *path)
{
	hub->fallback = *path;
	hub_rescan(hub);
}

int mem_hub_set_path(struct mem_hub *hub, const char *from, const char *to,
		     const struct mem_path *path)
{
	struct mem_rule *rule = rule_find(hub, from, to);

	if (!rule) {
		rule = mem_zalloc(sizeof(*rule));
		if (!rule)
			return err_pass(-ENOMEM);
		snprintf(rule->from, sizeof(rule->from), "%s", from);
		snprintf(rule->to, sizeof(rule->to), "%s", to);
		list_push_back(&hub->rules, &rule->link);
	}
	rule->path = *path;
	hub_rescan(hub);
	return 0;
}

int mem_hub_alias(struct mem_hub *hub, const char *alias, const char *endpoint)
{
	struct mem_alias *entry = mem_zalloc(sizeof(*entry));

	if (!entry)
		return err_pass(-ENOMEM);
	snprintf(entry->name, sizeof(entry->name), "%s", alias);
	snprintf(entry->endpoint, sizeof(entry->endpoint), "%s", endpoint);
	list_push_back(&hub->aliases, &entry->link);
	hub_rescan(hub);
	return 0;
}

int mem_hub_partition(struct mem_hub *hub, const char *a, const char *b, bool cut)
{
	struct mem_path there = *path_of(hub, a, b), back = *path_of(hub, b, a);
	int r;

	there.cut = back.cut = cut;
	r = mem_hub_set_path(hub, a, b, &there);
	if (r >= 0)
		r = mem_hub_set_path(hub, b, a, &back);
	return err_pass(r);
}

void mem_hub_break(struct mem_hub *hub, const char *from, const char *to)
{
	struct link_line *line;

	list_foreach_safe(line, &hub->lines, in_hub) {
		if (line->from && line->to && strcmp(line->from_endpoint, from) == 0 &&
		    strcmp(line->to_endpoint, to) == 0)
			line_break(line, (unsigned int)(loop_random_u64(hub->loop) %
							(line->count + 1)));
	}
}

void mem_hub_set_queue_max(struct mem_hub *hub, unsigned int frames)
{
	hub->queue_max = frames;
}

const struct mem_stats *mem_hub_stats(const struct mem_hub *hub)
{
	return &hub->stats;
}

int link_mem_new(struct mem_hub *hub, const char *endpoint, const char *user,
		 struct link **link_p)
{
	struct mem_node *node;

	if (node_find(hub, endpoint))
		return err_raise(ERR_EXIST, "%s: the hub has this endpoint", endpoint);
	node = mem_zalloc(sizeof(*node));
	if (!node || strmap_put(&hub->living, endpoint, node) < 0) {
		mem_free(node);
		return err_pass(-ENOMEM);
	}
	/* it answers what was sent to the dead machine with a reset */
	node_leave(&hub->grave, endpoint);
	node->link.ops = &mem_ops;
	node->hub = hub;
	snprintf(node->link.endpoint, sizeof(node->link.endpoint), "%s", endpoint);
	snprintf(node->user, sizeof(node->user), "%s", user);
	list_push_back(&hub->nodes, &node->in_hub);
	hub_rescan(hub);
	*link_p = &node->link;
	return 0;
}

void link_mem_crash(struct link *link, enum mem_crash how)
{
	struct mem_node *node = container_of(link, struct mem_node, link);
	struct link_line *line;

	if (node->crashed)
		return;
	node_die(node);
	node_silence(node, how == MEM_CRASH_POWER);
	if (how == MEM_CRASH_KILLED) {
		node_leave(node, NULL);
		return;
	}
	list_foreach(line, &node->hub->lines, in_hub) {
		if (line->to == node)
			line->to = &node->hub->grave;
	}
}

uint64_t link_mem_frames(const struct link *link)
{
	return container_of(link, struct mem_node, link)->frames;
}

void link_mem_freeze(struct link *link, bool frozen)
{
	struct mem_node *node = container_of(link, struct mem_node, link);

	node->frozen = frozen;
	hub_rescan(node->hub);
}
