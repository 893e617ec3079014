/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A remote is a peer with its data line. The control line comes up first (peer.c); then
 * the data line is opened (handshake_line.c), and both sides announce their pools.
 *
 * Rooms are notified of a lost peer at once (on_down: they become aborting) and reach
 * their terminal state when their ops have ended.
 */
#include "daemon/handshake/handshake.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake_impl.h"
#include "daemon/base/context.h"
#include "proto/json.h"

#define MAX_INFLIGHT_OPS 1024u /* posted to a peer and not done yet */
#define PROGRESS_BUDGET 64u    /* per turn, so that other sources get their share */

static bool parts_idle(const struct remote *remote)
{
	bool idle = true;

	MODULES_EACH(remote->kvd, m)
	{
		idle = idle && (!m->remote_idle || m->remote_idle(remote));
	}
	return idle;
}

static struct remote *remote_new(struct handshake *hs, struct peer *peer)
{
	const size_t member = offsetof(struct module, remote_bytes);
	struct {
		struct remote remote;
		max_align_t parts[];
	} *whole = mem_zalloc(sizeof(*whole) + modules_part_bytes(hs->kvd, member));
	struct remote *remote;

	if (!whole)
		return NULL;
	remote = &whole->remote;
	remote->kvd = hs->kvd;
	modules_part_place(hs->kvd, member, whole->parts, remote->part);
	remote->peer = peer;
	peer->user = remote;
	peer_hold(peer);
	remote->figures = METRIC_PEER_OTHER;
	sched_line_init(&remote->line, hs->sched);
	list_init(&remote->pools.list);
	list_init(&remote->pools.dead);
	list_init(&remote->announce.link);
	list_init(&remote->express.free);
	list_init(&remote->express.late);
	remote->dial.told = -1;
	remote->dial.down_ns = loop_now_ns(hs->kvd->loop);
	loop_timer_init(&remote->dial.again, hs->kvd->loop, line_on_again);
	list_push_back(&hs->remotes, &remote->link);
	peer_label(peer, remote->label);
	MODULES_EACH(hs->kvd, m)
	{
		if (m->remote_init)
			m->remote_init(remote);
	}
	return remote;
}

static void remote_free(struct remote *remote)
{
	assert(idmap_count(&remote->announce.shares) == 0 && parts_idle(remote));
	list_remove(&remote->link);
	list_remove(&remote->announce.link);
	idmap_fini(&remote->announce.shares);
	loop_timer_stop(&remote->dial.again);
	idmap_fini(&remote->pools.by_id);
	sched_line_fini(&remote->line);
	account_unref(remote->account);
	remote->peer->user = NULL;
	peer_release(remote->peer);
	mem_free(remote);
}

void remote_try_free(struct remote *remote)
{
	if (remote->reaches > 0 || remote->xp || remote->dial.closing ||
	    sm_state(&remote->peer->sm) == PEER_UP || !list_empty(&remote->pools.list) ||
	    !list_empty(&remote->pools.dead))
		return;
	remote_free(remote);
}

/* ---- calls from the transports ---- */

static void handshake_on_request(void *owner, struct xp_inbound *in)
{
	struct handshake *hs = owner;
	struct remote *remote = line_remote(in->peer);
	struct err why;

	in->owner = NULL;
	if (remote->dial.closing) { /* the peer may be up again: this line is stale */
		err_set(&why, ERR_PEER, "%s: the data connection is closing",
			remote->label);
		remote->transport->ops->land(in, NULL, &why);
	} else if (express_is(in)) {
		express_request(remote, in);
	} else {
		hs->events.on_request(hs->events.owner, remote, in);
	}
}

static void handshake_on_inbound_done(void *owner, struct xp_inbound *in,
				      const struct err *err)
{
	struct inbound_owner *answerer = in->owner;

	(void)owner;
	if (answerer)
		answerer->on_done(answerer, err);
}

static void on_key(void *owner, struct xp_key *key, const struct err *err)
{
	(void)owner;
	pools_key_ready(key, err);
}

/* An arm that answers busy means: call progress again before sleeping. */
static bool handshake_on_prepare(struct loop_prepare *prepare)
{
	struct handshake *hs = container_of(prepare, struct handshake, before_sleep);
	bool busy = false;

	for (unsigned int i = 0; i < hs->kvd->transport_count; i++) {
		struct transport *t = hs->kvd->transports[i];

		if (t->ops->progress && t->ops->progress(t, PROGRESS_BUDGET) > 0)
			busy = true;
		else if (t->ops->arm && t->ops->arm(t))
			busy = true;
	}
	return busy;
}

/* Would `require` allow it, if it were usable? */
static bool could_fulfil(const struct config *config, const char *name)
{
	const struct setting_words *req = &config->require;

	for (size_t i = 0; i < req->count; i++)
		if (!strcmp(req->word[i], name) ||
		    (!strcmp(req->word[i], "rdma") &&
		     (!strcmp(name, "verbs") || !strcmp(name, "ucx"))))
			return true;
	return req->count == 0;
}

static int open_transports(struct handshake *hs)
{
	struct kvd *kvd = hs->kvd;
	const struct setting_words *names = &kvd->config->transports;
	struct xp_env env = {.loop = kvd->loop,
			     .offload = kvd->offload,
			     .gates = kvd->gates,
			     .copier = kvd->copier,
			     .config = kvd->config,
			     .gpu = kvd->gpu};
	struct xp_callbacks callbacks = {
		.owner = hs,
		.on_request = handshake_on_request,
		.on_inbound_done = handshake_on_inbound_done,
		.on_peer_ready = line_on_ready,
		.on_peer_lost = line_on_lost,
		.on_key = on_key,
	};

	memcpy(env.boot_id, kvd->boot_id, sizeof(env.boot_id));
	for (size_t i = 0; i < names->count; i++) {
		const struct transport_ops *ops = transport_find(names->word[i]);
		struct transport *t = NULL;
		uint32_t caps = 0;
		struct err why;
		int r = ops ? ops->probe(kvd->config, &caps)
			    : err_raise(ERR_REQUIRE, "not built in");

		if (r >= 0)
			r = ops->open(&env, &callbacks, &t);
		if (r < 0) {
			err_take(&why);
			/* of the most preferred one */
			if (hs->transports_why.code == ERR_OK &&
			    could_fulfil(kvd->config, names->word[i]))
				hs->transports_why = why;
			/* in the default list: missing hardware is not worth a warning */
			if (kvd->config->transports_auto)
				log_info("transport", names->word[i], "not usable",
					 "why=\"%s\"", why.text);
			else
				log_warn("transport", names->word[i], "not usable",
					 "why=\"%s\"", why.text);
			continue;
		}
		kvd->transports[kvd->transport_count++] = t;
		if (kvd->transport_count == TRANSPORTS_MAX)
			break;
	}
	if (kvd->config->require.count && handshake_transports_ok(hs) < 0) {
		log_warn("transport", "require", "none of its transports is usable",
			 "effect=\"rooms are refused\" why=\"%s\"", err_last()->text);
		err_clear();
	}
	return 0;
}

int handshake_transports_ok(const struct handshake *hs)
{
	const struct kvd *kvd = hs->kvd;

	for (unsigned int i = 0; i < kvd->transport_count; i++) {
		if (line_allowed(kvd->config, kvd->transports[i]))
			return 0;
	}
	if (hs->transports_why.code != ERR_OK)
		return err_raise(ERR_REQUIRE, "no allowed transport: %s",
				 hs->transports_why.text);
	return err_raise(ERR_REQUIRE,
			 "none of the transports in `require` is usable here");
}

/* ---- calls from the peers ---- */

/* "NAME@HOST:PORT", without the key that an endpoint may carry. */
static void figures_begin(struct remote *remote)
{
	const struct peer *peer = remote->peer;
	const char *at = strstr(peer->endpoint, "://");
	char name[METRIC_PEER_NAME];

	at = at ? at + 3 : peer->endpoint;
	snprintf(name, sizeof(name), "%s@%.*s", peer->name, (int)strcspn(at, "#"), at);
	json_sanitize(name);
	remote->figures = metrics_peer(&remote->kvd->metrics, name, remote);
}

/* The account for its memory: that of its key, else of its address. All daemons with
 * one key share one, however many instances they are. Objects of an earlier peering
 * keep the account that they were charged to. */
static int remote_identify(struct remote *remote)
{
	const struct peer *peer = remote->peer;
	const char *host = strstr(peer->endpoint, "://");
	const char *end = strrchr(peer->endpoint, ':');
	struct account *account;
	char name[ACCOUNT_NAME_MAX];

	host = host ? host + 3 : peer->endpoint;
	if (peer->known_as[0])
		snprintf(name, sizeof(name), "%s", peer->known_as);
	else
		snprintf(name, sizeof(name), "%.*s",
			 end > host ? (int)(end - host) : (int)strlen(host), host);
	json_sanitize(name);
	account = account_get(&remote->kvd->accounts, peer->known_as[0] ? "peer" : "addr",
			      name);
	if (!account)
		return err_pass(-ENOMEM);
	account_unref(remote->account);
	remote->account = account;
	return 0;
}

/* An unused one is not lost, nor are those of a stopping daemon. */
static void figures_end(const struct remote *remote)
{
	struct metrics *metrics = &remote->kvd->metrics;
	enum err_code code = remote->peer->why.code;

	if (!remote->kvd->handshake->closing && code != ERR_CANCELED)
		metrics_add(metrics, METRIC_AT(PEER_LOST, remote->figures, 0), 1);
	metrics_peer_left(metrics, remote->figures, remote);
}

void handshake_moved(const struct remote *remote, enum metric_direction direction,
		     uint64_t bytes)
{
	struct metrics *metrics = &remote->kvd->metrics;

	metrics_add(metrics,
		    METRIC_AT(TRANSFERRED_BYTES, direction, remote->transport_index),
		    bytes);
	metrics_add(metrics, METRIC_AT(PEER_BYTES, remote->figures, direction), bytes);
	peer_count_bytes(remote->peer, direction == METRIC_OUT, bytes);
}

static void on_up(void *owner, struct peer *peer)
{
	struct handshake *hs = owner;
	struct remote *remote = peer->user ? peer->user : remote_new(hs, peer);

	if (!remote || remote_identify(remote) < 0) {
		struct err e;

		err_take(&e);
		peer_kill(peer, &e);
		return;
	}
	figures_begin(remote);
	hs->events.on_up(hs->events.owner, remote);
	if (remote->xp) {
		remote->dial.start_again = true;
		remote->why.code = ERR_OK; /* current rooms wait for the new line */
	} else {
		line_start(remote);
	}
}

static struct account *on_account(void *owner, const struct peer *peer)
{
	const struct remote *remote = peer->user;

	(void)owner;
	return remote ? remote->account : NULL;
}

static bool on_busy(void *owner, const struct peer *peer)
{
	const struct handshake *hs = owner;
	const struct remote *remote = peer->user;

	return modules_live(hs->kvd) > 0 || (remote && !parts_idle(remote));
}

static void handshake_on_down(void *owner, struct peer *peer)
{
	struct handshake *hs = owner;
	struct remote *remote = peer->user;

	if (!remote)
		return;
	figures_end(remote);
	line_forget(remote);
	remote->why = peer->why;
	remote->downs++;
	remote->down = peer->why;
	remote->down_dead = peer->totals.dead;
	remote->reaches++; /* not freed under our feet */
	/* Queued ops fail first, then the layers above release pools and lists; only
	 * then the pools are dead and the line is closed. Ops at the transport end
	 * during the close: objects that they use stay in pools.dead until then. */
	sched_line_set(&remote->line, NULL, NULL, &peer->why);
	hs->events.on_down(hs->events.owner, remote, &peer->why);
	pools_down(remote);
	line_close(remote);
	remote->reaches--;
	remote_try_free(remote);
}

/* The other daemon refused our HELLO, or the keys do not match: waiting rooms fail
 * with the reason instead of their timeout. */
static void handshake_on_refused(void *owner, struct peer *peer)
{
	struct handshake *hs = owner;
	struct remote *remote = peer->user;

	if (!remote)
		return;
	remote->why = peer->why;
	remote->refused = true;
	hs->events.on_change(hs->events.owner, remote);
}

static int handshake_on_message(void *owner, struct peer *peer,
				const struct wire_header *header, struct cursor *body)
{
	struct handshake *hs = owner;
	struct remote *remote = peer->user;

	if (!remote)
		return 0;
	if (header->type == WIRE_T_LINE)
		return line_message(remote, body);
	if (wire_owner(header->type) == WIRE_OWNER_HANDSHAKE)
		return pools_message(hs, remote, header, body);
	return hs->events.on_message(hs->events.owner, remote, header, body);
}

/* ---- life ---- */

static int make_peers(struct handshake *hs)
{
	struct kvd *kvd = hs->kvd;
	struct peers_args args = {
		.loop = kvd->loop,
		.link = kvd->link,
		.config = kvd->config,
		.callbacks = &hs->peer_callbacks,
		.name = kvd->config->name,
		.addresses = hs->addresses,
	};

	hs->peer_callbacks = (struct peers_callbacks){
		.owner = hs,
		.on_up = on_up,
		.on_down = handshake_on_down,
		.on_refused = handshake_on_refused,
		.account_of = on_account,
		.on_message = handshake_on_message,
		.busy = on_busy,
	};
	MODULES_EACH(kvd, m)
	args.features |= m->feature;
	for (unsigned int i = 0; i < kvd->transport_count; i++) {
		struct transport *t = kvd->transports[i];
		struct peer_address *a = &hs->addresses[args.address_count];

		if (t->address_len == 0 || args.address_count == TRANSPORTS_MAX ||
		    !line_allowed(kvd->config,
				  t)) /* it may not be chosen there, either */
			continue;
		snprintf(a->transport, sizeof(a->transport), "%s", t->ops->name);
		a->data = t->address;
		a->len = t->address_len;
		args.address_count++;
	}
	memcpy(args.boot_id, kvd->boot_id, sizeof(args.boot_id));
	return peers_new(&args, &kvd->peers);
}

int handshake_new(struct kvd *kvd, const struct handshake_events *events,
		  struct handshake **hs_p)
{
	struct handshake *hs = mem_zalloc(sizeof(*hs));
	int r = -ENOMEM;

	assert(kvd->transport_count <= TRANSPORTS_MAX);
	assert(events->on_message && events->on_request);
	if (!hs)
		return err_pass(r);
	hs->kvd = kvd;
	hs->events = *events;
	list_init(&hs->remotes);
	pools_init(hs);
	hs->before_sleep.on_prepare = handshake_on_prepare;
	loop_prepare_add(kvd->loop, &hs->before_sleep);
	kvd->publisher = &pools_publisher;
	hs->scratch = mem_alloc(WIRE_FRAME_MAX);
	hs->blob_scratch = mem_alloc(WIRE_FRAME_MAX);
	if (hs->scratch && hs->blob_scratch) {
		/* touched now, instead of a page fault each in a turn of the loop */
		memset(hs->scratch, 1, WIRE_FRAME_MAX);
		memset(hs->blob_scratch, 1, WIRE_FRAME_MAX);
		r = sched_new(kvd->loop, MAX_INFLIGHT_OPS,
			      kvd->config->max_inflight_bytes, &hs->sched);
	}
	if (r >= 0)
		r = open_transports(hs);
	if (r >= 0)
		r = make_peers(hs);
	if (r < 0) {
		handshake_free(hs);
		return err_pass(r);
	}
	*hs_p = hs;
	return 0;
}

void handshake_close(struct handshake *hs)
{
	hs->closing = true;
	if (hs->kvd->peers)
		peers_close(hs->kvd->peers, ERR_PEER, "the daemon is stopping");
}

bool handshake_drained(const struct handshake *hs)
{
	const struct remote *remote;

	list_foreach(remote, &hs->remotes, link) {
		if (remote->xp)
			return false;
	}
	return true;
}

void handshake_bytes(const struct handshake *hs, uint64_t *queued_p, uint64_t *posted_p)
{
	sched_bytes(hs->sched, queued_p, posted_p);
}

unsigned int handshake_plain_peers(const struct handshake *hs)
{
	const struct remote *remote;
	unsigned int n = 0;

	list_foreach(remote, &hs->remotes, link) {
		const struct xp_peer_base *xp = (const struct xp_peer_base *)remote->xp;

		n += xp && xp->ready && !xp->crypto && !remote->peer->same_host;
	}
	return n;
}

/* handshake_drained() was true: every data line is closed. */
void handshake_free(struct handshake *hs)
{
	struct remote *remote;

	if (!hs)
		return;
	list_foreach_safe(remote, &hs->remotes, link) {
		express_fini(remote);
		remote_free(remote);
	}
	idmap_fini(&hs->published);
	hs->kvd->publisher = NULL;
	idmap_fini(&hs->published_by_id);
	loop_work_stop(&hs->announcing);
	peers_free(hs->kvd->peers);
	hs->kvd->peers = NULL;
	loop_prepare_remove(&hs->before_sleep);
	while (hs->kvd->transport_count > 0) {
		struct transport *t = hs->kvd->transports[--hs->kvd->transport_count];

		t->ops->close(t);
	}
	sched_free(hs->sched);
	mem_free(hs->scratch);
	mem_free(hs->blob_scratch);
	mem_free(hs);
}

int handshake_reach(struct handshake *hs, const char *endpoint,
		    const struct peer_client *client, struct remote **remote_p)
{
	struct peer *peer;
	struct remote *remote;
	int r = peers_dial(hs->kvd->peers, endpoint, client, &peer);

	if (r < 0)
		return err_pass(r);
	remote = peer->user ? peer->user : remote_new(hs, peer);
	if (!remote) {
		peer_release(peer);
		return err_pass(-ENOMEM);
	}
	peer_release(peer); /* remote_new's hold keeps it from here on */
	remote->reaches++;
	*remote_p = remote;
	if (remote->refused && sm_state(&peer->sm) != PEER_UP) {
		remote->refused = false; /* of an earlier attempt: new users wait */
		remote->why.code = ERR_OK;
	}
	/* the self peer may be up before peers_dial() returned and the remote was
	 * known */
	if (sm_state(&peer->sm) == PEER_UP && !remote->xp && !remote->announce.begun &&
	    remote->why.code == ERR_OK)
		line_start(remote);
	return 0;
}

void handshake_release(struct remote *remote)
{
	assert(remote->reaches > 0);
	remote->reaches--;
	remote_try_free(remote);
}

/* Does an engine's call wait for this message? */
static bool is_urgent(enum wire_type type)
{
	return type == WIRE_T_REGISTER_ACK || type == WIRE_T_REGISTER_NAK ||
	       type == WIRE_T_ATTACH || type == WIRE_T_ATTACH_ACK ||
	       type == WIRE_T_TRANSFER_INFO || type == WIRE_T_TRANSFER_INFO_ACK ||
	       type == WIRE_T_ROOM_DONE || type == WIRE_T_OFFER_QUERY ||
	       type == WIRE_T_OFFER || type == WIRE_T_PULL_DONE ||
	       type == WIRE_T_PULL_ACK || type == WIRE_T_ATTENTION_CANCEL;
}

/* Does the data line protect its contents from readers of the network? */
static bool is_private(const struct remote *remote)
{
	const struct xp_peer_base *xp = (const struct xp_peer_base *)remote->xp;

	return remote->ready &&
	       ((remote->transport->caps & XP_CAP_SAME_HOST) || xp->encrypts);
}

int handshake_send(struct remote *remote, enum wire_type type, const void *body,
		   size_t len)
{
	assert(body || len == 0);
	if (is_urgent(type) &&
	    (is_private(remote) || !wire_shows_secret(type, body, len)))
		return peer_send_express(remote->peer, type, body, len);
	return peer_send_reliable(remote->peer, type, body, len);
}

int handshake_send_owned(struct remote *remote, enum wire_type type, uint8_t *owned,
			 size_t len)
{
	assert(owned);
	return peer_send_owned(remote->peer, type, owned, len);
}

void handshake_body(struct handshake *hs, struct cursor *out)
{
	cursor_write(out, hs->scratch, WIRE_FRAME_MAX - WIRE_HEADER_BYTES);
}

void handshake_blob(struct handshake *hs, struct cursor *out)
{
	cursor_write(out, hs->blob_scratch, WIRE_FRAME_MAX);
}

const struct list *handshake_remotes(const struct handshake *hs)
{
	return &hs->remotes;
}
