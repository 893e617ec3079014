/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon from birth to end. kvd_new() builds the members in the order in
 * which they need each other; kvd_free() takes them down in reverse and skips
 * what was never made, so it also cleans up after a kvd_new() that failed.
 *
 * The end comes in two steps. Drain (SIGTERM, the drain command): no new rooms,
 * running ones may end, a deadline is set. Stop: when nothing runs any more, at
 * the deadline, or at once on a second signal. SIGHUP reads the configuration
 * again and takes what can be taken while running; the file is small and local,
 * so it is read on the loop.
 */
#include "daemon/kvd.h"

#include <errno.h>
#include <signal.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config.h"
#include "daemon/features.h"
#include "daemon/notify.h"
#include "daemon/offload.h"

struct kvd_impl {
	struct kvd *kvd;
	struct config config; /* kvd->config points here */
	struct loop_signal term, intr, hup;
	struct loop_timer watchdog, deadline;
	uint64_t watchdog_ns;
};

static struct kvd_impl *impl_of(const struct kvd *kvd)
{
	return kvd->impl;
}

/* ---- the end ---- */

static void on_deadline(struct loop_timer *timer)
{
	struct kvd_impl *impl = container_of(timer, struct kvd_impl, deadline);

	log_warn("daemon", impl->config.name, "drain deadline passed", "sessions=%u",
		 impl->kvd->session_count);
	kvd_stop(impl->kvd);
}

/* Nothing of an engine is in flight any more. */
static bool is_quiet(const struct kvd *kvd)
{
	return kvd->session_count == 0;
}

void kvd_drain(struct kvd *kvd, uint64_t deadline_ns)
{
	struct kvd_impl *impl = impl_of(kvd);

	if (!kvd->draining) {
		log_info("daemon", impl->config.name, "draining", "deadline_ms=%llu",
			 (unsigned long long)(deadline_ns / LOOP_NS_PER_MS));
		notify_stopping("draining");
	}
	kvd->draining = true;
	if (is_quiet(kvd) || loop_timer_start(&impl->deadline, deadline_ns) < 0)
		kvd_stop(kvd);
}

void kvd_stop(struct kvd *kvd)
{
	kvd->stopping = true;
	loop_stop(kvd->loop);
}

static void on_term(struct loop_signal *sig)
{
	struct kvd_impl *impl = sig->signum == SIGTERM
					? container_of(sig, struct kvd_impl, term)
					: container_of(sig, struct kvd_impl, intr);

	if (impl->kvd->draining)
		kvd_stop(impl->kvd);
	else
		kvd_drain(impl->kvd, impl->config.drain_timeout_ns);
}

/* ---- reload ---- */

static void on_kept(void *arg, const char *name)
{
	const struct kvd_impl *impl = arg;

	log_warn("daemon", impl->config.name, "change needs a restart", "option=%s",
		 name);
}

static int reload(struct kvd_impl *impl, unsigned int *changed_p)
{
	cleanup_free struct config *fresh = mem_zalloc(sizeof(*fresh));
	const char *transports[FEATURES_TRANSPORTS_MAX];
	const struct config_source source = {
		.path = *impl->config.path ? impl->config.path : NULL,
		.name = impl->config.name,
		.transports = transports,
	};
	int r;

	if (!fresh)
		return err_pass(-ENOMEM);
	features_transports(transports);
	r = config_load(fresh, &source);
	if (r < 0)
		return err_pass(r);
	*changed_p = config_reload(&impl->config, fresh, on_kept, impl);
	log_set_level((enum log_level)impl->config.log_level);
	log_set_format((enum log_format)impl->config.log_format);
	return 0;
}

static void on_hup(struct loop_signal *sig)
{
	struct kvd_impl *impl = container_of(sig, struct kvd_impl, hup);
	unsigned int changed = 0;

	notify_reloading(loop_clock_ns(impl->kvd->loop));
	if (reload(impl, &changed) < 0)
		log_warn("daemon", impl->config.name, "not reloaded", "why=\"%s\"",
			 err_last()->text);
	else
		log_info("daemon", impl->config.name, "reloaded", "changed=%u", changed);
	notify_ready("serving");
}

/* ---- the watchdog ---- */

static void on_watchdog(struct loop_timer *timer)
{
	struct kvd_impl *impl = container_of(timer, struct kvd_impl, watchdog);

	notify_watchdog();
	/* a running heap has room: this timer was just in it */
	(void)loop_timer_start(timer, impl->watchdog_ns / 2);
}

/* ---- birth ---- */

static int start_signals(struct kvd_impl *impl)
{
	struct loop *loop = impl->kvd->loop;
	int r;

	signal(SIGPIPE, SIG_IGN); /* a peer that went is an error of its write */
	r = loop_signal_start(&impl->term, loop, SIGTERM, on_term);
	if (r == 0)
		r = loop_signal_start(&impl->intr, loop, SIGINT, on_term);
	if (r == 0)
		r = loop_signal_start(&impl->hup, loop, SIGHUP, on_hup);
	return err_pass(r);
}

static int start_watchdog(struct kvd_impl *impl)
{
	impl->watchdog_ns = impl->config.watchdog ? notify_watchdog_ns() : 0;
	if (!impl->watchdog_ns)
		return 0;
	return err_pass(loop_timer_start(&impl->watchdog, impl->watchdog_ns / 2));
}

static int kvd_init(struct kvd *kvd, const struct config *config)
{
	struct kvd_impl *impl = mem_zalloc(sizeof(*impl));
	int r;

	if (!impl)
		return err_pass(-ENOMEM);
	kvd->impl = impl;
	impl->kvd = kvd;
	impl->config = *config;
	kvd->config = &impl->config;
	r = loop_new(&kvd->loop);
	if (r < 0)
		return err_pass(r);
	kvd->started_ns = loop_now_ns(kvd->loop);
	loop_timer_init(&impl->watchdog, kvd->loop, on_watchdog);
	loop_timer_init(&impl->deadline, kvd->loop, on_deadline);
	r = start_signals(impl);
	if (r == 0)
		r = offload_new(kvd->loop, config->offload_threads, &kvd->offload);
	if (r == 0)
		r = start_watchdog(impl);
	return err_pass(r);
}

int kvd_new(const struct config *config, const struct kvd_sockets *sockets,
	    struct kvd **kvd_p)
{
	struct kvd *kvd = mem_zalloc(sizeof(*kvd));
	int r;

	(void)sockets;
	if (!kvd)
		return err_pass(-ENOMEM);
	list_init(&kvd->sessions);
	r = kvd_init(kvd, config);
	if (r < 0) {
		kvd_free(kvd);
		return err_pass(r);
	}
	*kvd_p = kvd;
	return 0;
}

int kvd_run(struct kvd *kvd)
{
	log_info("daemon", kvd->config->name, "ready", "version=%s config=%s",
		 KVD_VERSION, *kvd->config->path ? kvd->config->path : "defaults");
	notify_ready("serving");
	loop_run(kvd->loop);
	notify_stopping("stopping");
	return 0;
}

void kvd_free(struct kvd *kvd)
{
	struct kvd_impl *impl;

	if (!kvd)
		return;
	impl = impl_of(kvd);
	offload_free(kvd->offload);
	if (kvd->loop) {
		loop_timer_stop(&impl->watchdog);
		loop_timer_stop(&impl->deadline);
		loop_signal_stop(&impl->hup);
		loop_signal_stop(&impl->intr);
		loop_signal_stop(&impl->term);
	}
	loop_free(kvd->loop);
	mem_free(impl);
	mem_free(kvd);
}
