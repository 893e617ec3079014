/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events of libzmq 4.3 at the side that dials, and its reaction:
 *
 *   the other side's key checker refuses our key     FAILED_AUTH 400; the socket is dead
 *   one side has keys, the other has none            FAILED_PROTOCOL at the side that
 *                                                    reads first, whose socket is dead;
 *                                                    FAILED_NO_DETAIL, EPIPE at the other
 *   the other side has another key than we expect    FAILED_NO_DETAIL, EPIPE
 *   no listener, no route                            CONNECT_RETRIED
 *
 * A dead socket never connects again, so these end the line, and its owner dials again.
 * libzmq retries the others every 20 ms to 1 s. The greeting distinguishes the second row
 * from the third. In the third, a closed connection may also be a daemon that is
 * stopping, so three closed connections in a row, and a greeting in between, are
 * required.
 */
#include "daemon/link/link_trouble.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/link/link_curve.h"
#include "daemon/link/link_monitor.h"
#include "daemon/link/link_probe.h"
#include "daemon/loop/loop.h"

#define EVENTS                                                                   \
	(ZMQ_EVENT_HANDSHAKE_FAILED_AUTH | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | \
	 ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_CONNECT_RETRIED)
#define PROBE_EVERY_NS (2 * LOOP_NS_PER_S)
#define CLOSED_ENOUGH 3u
#define UNKNOWN_ENOUGH 2u

struct link_trouble {
	struct link_trouble_args args;
	struct link_monitor *monitor;
	struct link_probe *probe;
	uint64_t probed_ns;	 /* 0: never */
	unsigned int closed;	 /* consecutive handshakes closed by the other side */
	bool alike;		 /* the greeting shows that both have keys, or neither */
	bool unlike;		 /* libzmq reports that only one side has keys */
	struct loop_timer again; /* for a line whose key is unknown */
	char address[LINK_ENDPOINT_MAX], expected[CURVE_KEY_CHARS + 1];
	struct err why; /* to be reported */
	bool final;
	struct loop_defer tell;
};

/* In the next step of the loop, since the callback may free us. A final reason is not
 * replaced. */
static void trouble_tell(struct link_trouble *t, bool final, enum err_code code,
			 const char *text)
{
	if (t->final)
		return;
	err_set(&t->why, code, "%s", text);
	t->final = final;
	loop_defer(t->args.loop, &t->tell);
}

static void on_tell(struct loop_defer *defer)
{
	struct link_trouble *t = container_of(defer, struct link_trouble, tell);
	struct err why = t->why;

	t->args.on_trouble(t->args.owner, &why, t->final);
}

/* ---- texts ---- */

static void tell_refused(struct link_trouble *t)
{
	char text[ERR_TEXT_MAX];

	snprintf(text, sizeof(text),
		 "refuses this daemon's key; on its host add the line '%.170s' to its "
		 "curve_allow_file and reload it",
		 t->args.line);
	trouble_tell(t, true, ERR_AUTH, text);
}

static void tell_mechanism(struct link_trouble *t, bool other_has_keys)
{
	trouble_tell(t, true, ERR_AUTH,
		     other_has_keys ? "has CURVE keys, this daemon has none; set "
				      "insecure = no here"
				    : "has no CURVE keys, this daemon has; set "
				      "insecure = no on its host");
}

static void tell_other_key(struct link_trouble *t)
{
	char text[ERR_TEXT_MAX];

	snprintf(text, sizeof(text),
		 "does not have the expected CURVE key %s; correct its line in "
		 "curve_allow_file, or the endpoint",
		 t->expected);
	trouble_tell(t, true, ERR_AUTH, text);
}

static void tell_address(struct link_trouble *t, bool final, const char *what)
{
	char text[ERR_TEXT_MAX];

	snprintf(text, sizeof(text), "cannot be reached: %s: %s",
		 t->address + strlen("tcp://"), what);
	trouble_tell(t, final, ERR_PEER, text);
}

/* There is no connection, so each check is a probe. The first may have been made
 * before a starting daemon of this user has published its key. */
static void tell_unknown_key(struct link_trouble *t)
{
	char text[ERR_TEXT_MAX];

	if (t->args.queried) {
		trouble_tell(t, false, ERR_PEER,
			     "has a key that is neither in curve_allow_file nor, so far, "
			     "in the directory; the daemon publishes it there with "
			     "cluster_trust = directory");
		return;
	}
	snprintf(text, sizeof(text),
		 "has a key that is not known here; append '#' and its key to the "
		 "endpoint, or add its line, NAME KEY %.100s, to curve_allow_file here "
		 "(kvd-ctl keys prints it there)",
		 t->address + strlen("tcp://"));
	trouble_tell(t, ++t->closed >= UNKNOWN_ENOUGH, ERR_AUTH, text);
}

/* ---- the probe ---- */

static void look_at_closed(struct link_trouble *t)
{
	if (!t->alike || t->closed < CLOSED_ENOUGH)
		return;
	if (t->args.curve)
		tell_other_key(t);
	else
		tell_address(t, false,
			     "connections are closed during ZeroMQ's handshake");
}

static void trouble_on_found(void *owner, enum probe_found found, int no)
{
	struct link_trouble *t = owner;

	link_probe_free(t->probe);
	t->probe = NULL;
	if (t->unlike) {
		tell_mechanism(t, !t->args.curve);
	} else if (found == PROBE_ERRNO) {
		t->closed = 0;
		tell_address(t, false, err_connect_words(no));
	} else if (found == PROBE_CLOSED) {
		tell_address(t, false, "connections are closed without a greeting");
	} else if (found == PROBE_SILENT) {
		tell_address(t, false, "connections are accepted but not answered");
	} else if (found == PROBE_NOT_ZMTP) {
		tell_address(t, true, "the service on this port is not kvd");
	} else if ((found == PROBE_CURVE) != t->args.curve) {
		tell_mechanism(t, found == PROBE_CURVE);
	} else if (t->args.curve && !*t->expected) {
		tell_unknown_key(t);
	} else {
		t->alike = true;
		look_at_closed(t);
	}
}

static void trouble_probe(struct link_trouble *t)
{
	uint64_t now_ns = loop_now_ns(t->args.loop);

	if (t->probe || !*t->address || t->final ||
	    (t->probed_ns && now_ns - t->probed_ns < PROBE_EVERY_NS))
		return;
	t->probed_ns = now_ns;
	if (link_probe_new(t->args.loop, t->address, t->args.curve, trouble_on_found, t,
			   &t->probe) < 0)
		err_clear(); /* another time */
}

static void trouble_on_again(struct loop_timer *timer)
{
	struct link_trouble *t = container_of(timer, struct link_trouble, again);

	trouble_probe(t);
	loop_timer_start(timer, PROBE_EVERY_NS);
}

/* The other side may have seen only the end of a connection: the probe sends our
 * mechanism. */
static void on_mismatch(struct link_trouble *t)
{
	t->unlike = true;
	trouble_probe(t);
	if (!t->probe)
		tell_mechanism(t, !t->args.curve);
}

/* ---- events of libzmq ---- */

static void on_protocol(struct link_trouble *t, uint32_t value)
{
	char text[80];

	if (value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) {
		on_mismatch(t);
	} else if (value == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC) {
		tell_other_key(t);
	} else {
		snprintf(text, sizeof(text), "violates ZeroMQ's handshake (0x%x)", value);
		tell_address(t, true, text);
	}
}

static void trouble_on_event(void *owner, int event, uint32_t value)
{
	struct link_trouble *t = owner;

	if (event == ZMQ_EVENT_HANDSHAKE_FAILED_AUTH) {
		tell_refused(t);
	} else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL) {
		on_protocol(t, value);
	} else {
		if (event == ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL)
			t->closed =
				value == EPIPE || value == ECONNRESET ? t->closed + 1 : 0;
		trouble_probe(t);
		look_at_closed(t);
	}
}

/* ---- for the link ---- */

int link_trouble_new(const struct link_trouble_args *args, struct link_trouble **t_p)
{
	struct link_trouble *t = mem_zalloc(sizeof(*t));
	int r;

	if (!t)
		return err_pass(-ENOMEM);
	t->args = *args;
	if (args->expected)
		snprintf(t->expected, sizeof(t->expected), "%s", args->expected);
	loop_defer_init(&t->tell, on_tell);
	loop_timer_init(&t->again, args->loop, trouble_on_again);
	r = link_monitor_new(args->loop, args->context, args->socket, EVENTS,
			     trouble_on_event, t, &t->monitor);
	if (r < 0) {
		mem_free(t);
		return err_pass(r);
	}
	*t_p = t;
	return 0;
}

void link_trouble_address(struct link_trouble *t, const char *address)
{
	if (!t || strcmp(t->address, address) == 0)
		return;
	link_probe_free(t->probe);
	t->probe = NULL;
	t->probed_ns = 0;
	t->closed = 0;
	t->alike = t->unlike = false;
	snprintf(t->address, sizeof(t->address), "%s", address);
	if (t->args.curve && !*t->expected)
		loop_timer_start(&t->again, 0);
}

void link_trouble_name(struct link_trouble *t, const char *host, const char *why)
{
	char text[ERR_TEXT_MAX];

	if (!t)
		return;
	snprintf(text, sizeof(text), "cannot be reached: %.127s: %.100s", host, why);
	trouble_tell(t, false, ERR_PEER, text);
}

void link_trouble_free(struct link_trouble *t)
{
	if (!t)
		return;
	loop_defer_cancel(&t->tell);
	loop_timer_stop(&t->again);
	link_probe_free(t->probe);
	link_monitor_free(t->monitor);
	mem_free(t);
}
