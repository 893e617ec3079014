/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon from construction to end. kvd_new() builds the members in the order of their
 * dependencies; kvd_free() takes them down in reverse and skips missing ones, so it also
 * cleans up after a kvd_new() that failed.
 *
 * The end has two steps. Drain (SIGTERM, the drain command): no new rooms, running ones
 * may end, a deadline is set. Stop: when all have ended, at the deadline, or at once on a
 * second signal. SIGHUP reloads the configuration and applies the reloadable options; the
 * file is small and local, so it is read on the loop.
 */
#include "daemon/kvd.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/base/cpu.h"
#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/control/control.h"
#include "daemon/features.h"
#include "daemon/gate/gate.h"
#include "daemon/gate/sandbox.h"
#include "daemon/handshake/handshake.h"
#include "daemon/link/link.h"
#include "daemon/link/link_curve.h"
#include "daemon/loop/notify.h"
#include "daemon/loop/offload.h"
#include "daemon/modules.h"
#include "daemon/peer/peer.h"
#include "daemon/room/rooms.h"
#include "daemon/memory/copy.h"
#include "daemon/memory/memory.h"
#include "daemon/metrics/http.h"
#include "gpu/gpu.h"
#include "daemon/xfer/xfer.h"

/* Interval at which a draining daemon checks whether its rooms have ended, and the
 * time that a stopping one waits for fences, last messages and connections. */
#define DRAIN_LOOK_NS (20 * LOOP_NS_PER_MS)
#define RETURN_NEXT_NS (10 * LOOP_NS_PER_MS) /* while mem_return() has more */
#define STOP_NS (5 * LOOP_NS_PER_S)

struct kvd_impl {
	struct kvd *kvd;
	struct config config; /* kvd->config points here */
	struct loop_signal term, intr, hup;
	struct loop_timer watchdog, drain;
	uint64_t watchdog_ns;
	uint64_t drain_until_ns;
	uint64_t drain_reported_ns; /* time of its last report */
	bool gates_lost; /* exits with an error, so that a service manager starts it
			    again */
};

static struct kvd_impl *kvd_impl_of(const struct kvd *kvd)
{
	return kvd->impl;
}

/* ---- the end ---- */

/* What delays the drain: open rooms count, too. */
static void drain_words(const struct kvd_impl *impl, char *text, size_t size)
{
	const struct kvd *kvd = impl->kvd;
	uint64_t now = loop_now_ns(kvd->loop);
	uint64_t left = impl->drain_until_ns > now ? impl->drain_until_ns - now : 0;
	const struct rooms *rooms = rooms_of(kvd);

	snprintf(text, size,
		 "draining: %u rooms open, %u of them transferring, %u transfers; at "
		 "most %llu s more",
		 rooms_live(rooms), rooms_moving(rooms), xfers_live(xfers_of(kvd)),
		 (unsigned long long)((left + LOOP_NS_PER_S - 1) / LOOP_NS_PER_S));
}

static void drain_tell(struct kvd_impl *impl)
{
	uint64_t now = loop_now_ns(impl->kvd->loop);
	char text[160];

	if (now - impl->drain_reported_ns < LOOP_NS_PER_S)
		return;
	impl->drain_reported_ns = now;
	drain_words(impl, text, sizeof(text));
	notify_status(text);
}

static void on_drain_timer(struct loop_timer *timer)
{
	struct kvd_impl *impl = container_of(timer, struct kvd_impl, drain);
	struct kvd *kvd = impl->kvd;

	/* All operations of engines have ended, and the messages of their success are
	 * sent. */
	if (modules_live(kvd) == 0 && handshake_quiet(kvd->handshake)) {
		kvd_stop(kvd);
	} else if (loop_now_ns(kvd->loop) >= impl->drain_until_ns) {
		log_warn("daemon", impl->config.name, "drain deadline passed",
			 "rooms=%u transfers=%u", rooms_live(rooms_of(kvd)),
			 xfers_live(xfers_of(kvd)));
		kvd_stop(kvd);
	} else {
		drain_tell(impl);
		loop_timer_start(timer, DRAIN_LOOK_NS);
	}
}

void kvd_drain(struct kvd *kvd, uint64_t deadline_ns)
{
	struct kvd_impl *impl = kvd_impl_of(kvd);
	char text[160];

	if (kvd->draining)
		return;
	log_info("daemon", impl->config.name, "draining",
		 "deadline_ms=%llu rooms=%u moving=%u",
		 (unsigned long long)(deadline_ns / LOOP_NS_PER_MS),
		 rooms_live(rooms_of(kvd)), rooms_moving(rooms_of(kvd)));
	impl->drain_until_ns = loop_now_ns(kvd->loop) + deadline_ns;
	impl->drain_reported_ns = loop_now_ns(kvd->loop);
	drain_words(impl, text, sizeof(text));
	notify_stopping(text);
	kvd->draining = true;
	modules_drain(kvd);
	/* not at once: the command's answer is sent first */
	loop_timer_start(&impl->drain, LOOP_NS_PER_MS);
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

static int load_again(const struct kvd_impl *impl, struct config *fresh)
{
	const char *transports[TRANSPORTS_MAX];
	const struct config_source source = {
		.path = *impl->config.path ? impl->config.path : NULL,
		.name = impl->config.name,
		.transports = transports,
	};

	features_transports(transports);
	return err_pass(config_load(fresh, &source));
}

int kvd_reload(struct kvd *kvd, bool apply,
	       void (*on_differ)(void *arg, const struct setting *row,
				 const struct config *fresh),
	       void *arg, struct curve_changes *keys_p, struct kvd_ended *ended_p)
{
	cleanup_free struct config *fresh = mem_zalloc(sizeof(*fresh));
	struct kvd_impl *impl = kvd_impl_of(kvd);
	const struct setting *row;
	size_t count;
	int r = fresh ? load_again(impl, fresh) : -ENOMEM;

	*ended_p = (struct kvd_ended){0};
	if (r == 0)
		r = modules_reload(kvd, false);
	if (r == 0)
		r = link_zmq_reload(kvd->link, fresh->curve_allow_file, apply, keys_p);
	if (r < 0)
		return err_pass(r);
	for (row = config_settings(&count); count; count--, row++) {
		if (!setting_equal(row, &impl->config, fresh))
			on_differ(arg, row, fresh);
	}
	if (!apply)
		return 0;
	r = modules_reload(kvd, true);
	if (r < 0)
		return err_pass(r);
	config_reload(&impl->config, fresh, on_kept, impl);
	kvd->accounts.limit = impl->config.memory_bytes;
	log_set_level((enum log_level)impl->config.log_level);
	log_set_format((enum log_format)impl->config.log_format);
	peers_reload(kvd->peers, &impl->config);
	ended_p->peerings = peers_recheck(kvd->peers);
	ended_p->sessions = control_recheck(control_of(kvd));
	return 0;
}

static void count_reloaded(void *arg, const struct setting *row,
			   const struct config *fresh)
{
	unsigned int *changed = arg;

	(void)fresh;
	*changed += row->reload;
}

/* To systemd: a daemon that refuses rooms is up, and `systemctl status` shows the
 * reason. */
static void say_ready(const struct kvd *kvd)
{
	char text[400] = "serving";

	if (handshake_transports_ok(kvd->handshake) < 0) {
		snprintf(text, sizeof(text), "refusing rooms: %s", err_last()->text);
		err_clear();
	}
	notify_ready(text);
}

static void on_hup(struct loop_signal *sig)
{
	struct kvd_impl *impl = container_of(sig, struct kvd_impl, hup);
	struct curve_changes keys;
	struct kvd_ended ended;
	unsigned int changed = 0;

	notify_reloading(loop_clock_ns(impl->kvd->loop));
	if (kvd_reload(impl->kvd, true, count_reloaded, &changed, &keys, &ended) < 0)
		log_warn("daemon", impl->config.name, "not reloaded", "why=\"%s\"",
			 err_last()->text);
	else
		log_info("daemon", impl->config.name, "reloaded",
			 "changed=%u peerings_ended=%u sessions_ended=%u", changed,
			 ended.peerings, ended.sessions);
	say_ready(impl->kvd);
}

/* ---- the watchdog ---- */

static void on_watchdog(struct loop_timer *timer)
{
	struct kvd_impl *impl = container_of(timer, struct kvd_impl, watchdog);

	notify_watchdog();
	loop_timer_start(timer, impl->watchdog_ns / 2);
}

/* ---- construction ---- */

static int start_signals(struct kvd_impl *impl)
{
	struct loop *loop = impl->kvd->loop;
	int r;

	signal(SIGPIPE, SIG_IGN); /* a closed peer is an error of its write */
	signal(SIGXFSZ, SIG_IGN); /* and a write beyond a file's size limit */
	r = loop_signal_start(&impl->term, loop, SIGTERM, on_term);
	if (r == 0)
		r = loop_signal_start(&impl->intr, loop, SIGINT, on_term);
	if (r == 0)
		r = loop_signal_start(&impl->hup, loop, SIGHUP, on_hup);
	return err_pass(r);
}

/* The kernel's id of this boot: daemons with the same one share a host. */
static int read_boot_id(uint8_t id[16])
{
	static const char path[] = "/proc/sys/kernel/random/boot_id";
	char text[UUID_CHARS + 1] = "";
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || read(fd, text, sizeof(text) - 1) < 0)
		return err_raise_errno(errno, "%s", path);
	return uuid_read(text, id)
		       ? 0
		       : err_raise(ERR_IO, "%s: '%s' is not a UUID", path, text);
}

static void on_gates_lost(void *arg)
{
	struct kvd *kvd = arg;

	log_error("daemon", kvd->config->name,
		  "stopping: its process kvd-warden has ended", "sessions=%u",
		  kvd->session_count);
	kvd_impl_of(kvd)->gates_lost = true;
	kvd_stop(kvd);
}

/* First the layers that move bytes and know peers, then those that engines see. */
static int build(struct kvd *kvd)
{
	const struct config *config = kvd->config;
	struct handshake_events events = handshake_events_of(kvd);
	const char *option;
	int r = read_boot_id(kvd->boot_id);

	if (r == 0)
		r = modules_check_options(config, &option);
	if (r == 0)
		r = memory_guard_install();
	if (r == 0)
		r = copier_new(kvd->loop, config->copy_threads, config->slice_bytes,
			       &kvd->copier);
	if (r == 0)
		r = gpu_new(config->cuda_library, config->gpu, &kvd->gpu);
	if (r == 0)
		r = gpu_tune(kvd->gpu, config->gpu_kernels, GPU_KERNEL_ROW_BYTES,
			     GPU_STREAMS);
	if (r == 0)
		r = link_zmq_new(kvd->loop, config, &kvd->link);
	if (r == 0)
		r = handshake_new(kvd, &events, &kvd->handshake);
	if (r == 0)
		r = modules_new(kvd);
	if (r >= 0)
		r = http_new(kvd, &kvd->http);
	return err_pass(r);
}

static int kvd_init(struct kvd *kvd, const struct config *config,
		    const struct kvd_sockets *sockets)
{
	struct kvd_impl *impl = mem_zalloc(sizeof(*impl));
	struct rlimit fds;
	int r;

	if (!impl)
		return err_pass(-ENOMEM);
	kvd->impl = impl;
	impl->kvd = kvd;
	impl->config = *config;
	kvd->config = &impl->config;
	kvd->sockets = sockets;
	kvd->accounts.limit = config->memory_bytes;
	if (getrlimit(RLIMIT_NOFILE, &fds) == 0) /* the other half: peers, itself */
		kvd->accounts.fds_limit = fds.rlim_cur / 2;
	kvd->accounts.metrics = &kvd->metrics;
	r = loop_new(&kvd->loop);
	if (r < 0)
		return err_pass(r);
	kvd->started_ns = loop_now_ns(kvd->loop);
	loop_timer_init(&impl->watchdog, kvd->loop, on_watchdog);
	loop_timer_init(&impl->drain, kvd->loop, on_drain_timer);
	r = start_signals(impl);
	if (r == 0)
		r = gates_new(kvd->loop, sockets->warden_fd, on_gates_lost, kvd,
			      &kvd->gates);
	if (r == 0)
		r = offload_new(kvd->loop, config->offload_threads, &kvd->offload);
	cpu_prompt(); /* this thread and ZeroMQ's; those that move bytes are not */
	if (r == 0)
		r = build(kvd);
	kvd->sockets = NULL;
	impl->watchdog_ns = notify_watchdog_ns();
	if (impl->watchdog_ns)
		loop_timer_start(&impl->watchdog, impl->watchdog_ns / 2);
	return err_pass(r);
}

int kvd_new(const struct config *config, const struct kvd_sockets *sockets,
	    struct kvd **kvd_p)
{
	struct kvd *kvd = mem_zalloc(sizeof(*kvd));
	int r;

	if (!kvd)
		return err_pass(-ENOMEM);
	memory_hurry(false);
	list_init(&kvd->sessions);
	kvd->modules = modules_built;
	r = kvd_init(kvd, config, sockets);
	if (r < 0) {
		kvd_free(kvd);
		return err_pass(r);
	}
	*kvd_p = kvd;
	return 0;
}

static bool is_drained(const struct kvd *kvd, struct err *why_p)
{
	return modules_drained(kvd, why_p) && handshake_drained(kvd->handshake);
}

/* Fail running operations, notify all, and run the loop until all has quiesced. A
 * session may wait for a peer that releases nothing: half of the time, then peers are
 * cut. */
static int wind_up(struct kvd *kvd)
{
	uint64_t until = loop_clock_ns(kvd->loop) + STOP_NS;
	struct err why;

	memory_hurry(true);
	err_set(&why, ERR_DRAIN, "the daemon is stopping");
	modules_close(kvd, &why);
	while (!control_idle(control_of(kvd)) &&
	       loop_clock_ns(kvd->loop) < until - STOP_NS / 2)
		loop_turn(kvd->loop, DRAIN_LOOK_NS);
	handshake_close(kvd->handshake);
	while (!is_drained(kvd, &why) && loop_clock_ns(kvd->loop) < until)
		loop_turn(kvd->loop, DRAIN_LOOK_NS);
	if (is_drained(kvd, &why))
		return 0;
	kvd->abandoned = true; /* the kernel frees the rest */
	if (why.code != ERR_OK) {
		notify_status(why.text);
		return err_reraise(&why);
	}
	return err_raise(ERR_TIMEOUT, "not quiesced in time: %u sessions, %u rooms",
			 kvd->session_count, rooms_count(rooms_of(kvd)));
}

/* No library is loaded and no process started from here on. */
static int close_in(const struct kvd *kvd)
{
	if (sandbox_enter(SANDBOX_MAIN) < 0)
		return err_raise_errno(errno,
				       "dropping system calls; set sandbox = no to "
				       "keep them");
	if (*sandbox_lacks())
		log_info("daemon", kvd->config->name, "sandbox is incomplete",
			 "why=\"%s\" has=\"%s\"", sandbox_lacks(), sandbox_words());
	return 0;
}

static bool kvd_on_prepare(struct loop_prepare *prepare)
{
	(void)prepare;
	mem_settle();
	return false;
}

static void on_return_memory(struct loop_timer *timer)
{
	if (mem_return())
		loop_timer_start(timer, RETURN_NEXT_NS);
	else
		loop_timer_start_tick(timer, LOOP_NS_PER_S);
}

int kvd_run(struct kvd *kvd)
{
	struct loop_prepare settle = {.on_prepare = kvd_on_prepare};
	struct loop_timer return_memory;
	int r = close_in(kvd);

	if (r < 0)
		return err_pass(r);
	if (kvd->config->insecure)
		log_warn("daemon", kvd->config->name,
			 "insecure: any host that can connect to the ports can read and "
			 "write the engines' caches",
			 "listen=%s", kvd->config->listen);
	log_info("daemon", kvd->config->name, "ready", "version=%s config=%s",
		 KVD_VERSION, *kvd->config->path ? kvd->config->path : "defaults");
	say_ready(kvd);
	mem_large_to(offload_discard_block, kvd->offload);
	loop_prepare_add(kvd->loop, &settle);
	loop_timer_init(&return_memory, kvd->loop, on_return_memory);
	loop_timer_start_tick(&return_memory, LOOP_NS_PER_S);
	loop_run(kvd->loop);
	loop_timer_stop(&return_memory);
	loop_prepare_remove(&settle);
	mem_large_to(NULL, NULL);
	notify_stopping("stopping");
	r = wind_up(kvd);
	if (r == 0 && kvd_impl_of(kvd)->gates_lost)
		r = err_raise(ERR_INTERNAL, "stopped because kvd-warden ended");
	return r;
}

void kvd_free(struct kvd *kvd)
{
	struct kvd_impl *impl;
	bool idle;

	if (!kvd)
		return;
	impl = kvd_impl_of(kvd);
	if (kvd->abandoned)
		return;
	http_free(kvd->http);
	modules_free(kvd);
	handshake_free(kvd->handshake);
	if (kvd->link)
		kvd->link->ops->free(kvd->link);
	copier_free(kvd->copier);
	offload_free(kvd->offload);
	idle = accounts_idle(&kvd->accounts);
	assert(idle);	    /* all charges were returned */
	gpu_free(kvd->gpu); /* after the last import */
	gates_free(kvd->gates);
	if (kvd->loop) {
		loop_timer_stop(&impl->watchdog);
		loop_timer_stop(&impl->drain);
		loop_signal_stop(&impl->hup);
		loop_signal_stop(&impl->intr);
		loop_signal_stop(&impl->term);
	}
	loop_free(kvd->loop);
	mem_free(impl);
	mem_free(kvd);
}
