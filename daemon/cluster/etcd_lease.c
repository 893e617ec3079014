/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One lease for all publications of this daemon. It is lost when etcd reports so, not
 * when it was not renewed in time: while etcd is unavailable the state is unknown, and an
 * etcd that restarts extends its leases.
 *
 * The places of a killed daemon stay until its lease ends, for seconds. The next daemon
 * of that name reads the lease's number from a file, and revokes it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/cluster/etcd_impl.h"

static void lease_write(struct etcd *e)
{
	char line[24];
	cleanup_close int fd = -1;
	int len;

	if (!e->lease_file)
		return;
	fd = open(e->lease_file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW,
		  0600);
	len = snprintf(line, sizeof(line), "%ju\n", (uintmax_t)e->lease.id);
	if (fd < 0 || write(fd, line, (size_t)len) != len)
		log_warn("etcd", e->lease_file, "the lease number could not be saved",
			 "effect='after a crash, its places stay taken until it "
			 "expires' why='%s'",
			 strerror(errno));
}

static void lease_read(struct etcd *e)
{
	char line[24] = "";
	cleanup_close int fd = -1;
	ssize_t len;
	char *end;

	if (!e->lease_file)
		return;
	fd = open(e->lease_file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	len = fd < 0 ? -1 : read(fd, line, sizeof(line) - 1);
	if (len < 2)
		return;
	e->lease.old = strtoull(line, &end, 10);
	if (*end != '\n' || e->lease.old > INT64_MAX)
		e->lease.old = 0;
}

static void lease_wait(struct etcd *e)
{
	e->lease.failures++;
	loop_timer_start(&e->lease.timer, etcd_pause(e, e->lease.failures));
}

void etcd_lease_lost(struct etcd *e, const char *why)
{
	struct etcd_own *own;
	struct err err;

	log_warn("etcd", e->url.prefix, "lease lost; all places are published again",
		 "why='%s'", why);
	etcd_request_cancel(&e->lease.request);
	loop_timer_stop(&e->lease.timer);
	e->lease.id = 0;
	if (loop_now_ns(e->loop) - e->lease.granted_ns < ETCD_AGAIN_NS)
		lease_wait(e);
	list_foreach(own, &e->owns, link) /* at most 4096: ETCD_OWN_MAX */
		etcd_own_lost(own);
	err_set(&err, ERR_BUSY, "etcd: lease lost: %s", why);
	etcd_state_check(e, &err);
	etcd_kick(e);
}

static void lease_refused(struct etcd *e, const char *what)
{
	struct err err;

	etcd_refusal(&e->lease.request.answer, what, &err);
	if (e->lease.failures == 0)
		log_warn("etcd", e->url.prefix, "no lease", "why='%s'", err.text);
	lease_wait(e);
	etcd_state_check(e, &err);
}

static void lease_granted(struct etcd *e)
{
	struct etcd_lease *lease = &e->lease;
	uint64_t ttl_s;

	if (lease->request.answer.lease == 0) {
		lease_refused(e, "lease");
		return;
	}
	lease->id = lease->request.answer.lease;
	ttl_s = lease->request.answer.ttl ? lease->request.answer.ttl : e->lease_s;
	if (ttl_s > ETCD_LEASE_MAX_S)
		ttl_s = ETCD_LEASE_MAX_S;
	lease->ttl_ns = ttl_s * LOOP_NS_PER_S;
	lease->failures = 0;
	lease->granted_ns = loop_now_ns(e->loop);
	lease_write(e);
	loop_timer_start(&lease->timer, etcd_jitter(e, lease->ttl_ns * 4 / 9));
	etcd_state_check(e, NULL);
}

static void lease_kept(struct etcd *e)
{
	if (e->lease.request.answer.ttl == 0) {
		etcd_lease_lost(e, "etcd does not know the lease");
		return;
	}
	e->lease.failures = 0;
	loop_timer_start(&e->lease.timer, etcd_jitter(e, e->lease.ttl_ns * 4 / 9));
	etcd_state_check(e, NULL);
}

static void lease_on_done(struct etcd_request *request, enum etcd_outcome outcome)
{
	enum { NOT_FOUND = 5 };
	struct etcd *e = request->etcd;
	bool answered = outcome == ETCD_ANSWERED;

	if (outcome == ETCD_BROKEN) {
		loop_timer_stop(&e->lease.timer); /* at once when the link is up */
		return;
	}
	switch (e->lease.op) {
	case LEASE_REVOKE:
		e->lease.old = 0;
		break;
	case LEASE_GRANT:
		if (answered)
			lease_granted(e);
		else
			lease_refused(e, "lease");
		break;
	case LEASE_KEEP:
		if (answered)
			lease_kept(e);
		else if (request->answer.error_code == NOT_FOUND)
			etcd_lease_lost(e, "etcd does not know the lease");
		else
			lease_refused(e, "lease");
		break;
	}
	etcd_kick(e);
}

static int lease_ask(struct etcd *e)
{
	static const char *const paths[] = {
		[LEASE_REVOKE] = "lease/revoke",
		[LEASE_GRANT] = "lease/grant",
		[LEASE_KEEP] = "lease/keepalive",
	};
	struct etcd_lease *lease = &e->lease;
	struct text body = {NULL};

	out_object(&body, NULL);
	if (lease->op == LEASE_GRANT)
		out_id(&body, "TTL", e->lease_s);
	else
		out_id(&body, "ID", lease->op == LEASE_KEEP ? lease->id : lease->old);
	out_close(&body, '}');
	return err_pass(etcd_request_start(&lease->request, paths[lease->op], &body));
}

void etcd_lease_step(struct etcd *e)
{
	struct etcd_lease *lease = &e->lease;

	if (!etcd_link_up(&e->link) || etcd_request_busy(&lease->request) ||
	    loop_timer_running(&lease->timer))
		return;
	lease->op = lease->old ? LEASE_REVOKE : lease->id ? LEASE_KEEP : LEASE_GRANT;
	if (lease_ask(e) < 0) {
		err_clear();
		lease_wait(e);
	}
}

static void lease_on_timer(struct loop_timer *timer)
{
	etcd_kick(container_of(timer, struct etcd, lease.timer));
}

void etcd_lease_init(struct etcd *e)
{
	etcd_request_init(e, &e->lease.request, lease_on_done);
	loop_timer_init(&e->lease.timer, e->loop, lease_on_timer);
	lease_read(e);
}

/* Its keys are removed at once, if etcd replies in a moment. */
void etcd_lease_fini(struct etcd *e)
{
	struct etcd_lease *lease = &e->lease;

	loop_timer_stop(&lease->timer);
	etcd_request_cancel(&lease->request);
	if (!etcd_link_up(&e->link) || !lease->id)
		return;
	lease->old = lease->id;
	lease->id = 0;
	lease->op = LEASE_REVOKE;
	if (lease_ask(e) < 0)
		err_clear();
	etcd_curl_wait(e, &lease->request, 250 * LOOP_NS_PER_MS);
	if (!lease->old && e->lease_file)
		(void)unlink(e->lease_file);
	etcd_request_cancel(&lease->request);
}
