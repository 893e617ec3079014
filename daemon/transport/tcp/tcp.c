/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tcp backend: any two daemons that have an IP path between them.
 *
 * A peer has one control line, the loop's own, for requests and answers, and
 * some streams, which I/O threads serve, for bytes. A request names a transfer,
 * and each side has its own checked plan of it, so frames of data name a stretch
 * of a stream and nothing else: 100 000 rows cost no more description than one.
 *
 *   WRITE  REQUEST -> on_request, land() -> GO -> DATA … -> DONE
 *   READ   REQUEST -> on_request, land() -> SERVE … -> DONE
 *
 * A small WRITE's bytes travel in the REQUEST, a small READ's in the DONE: no
 * round trip, no other thread.
 *
 * Rows are passed to the kernel in place (writev, readv), short ones packed: cheaper than
 * MSG_ZEROCOPY and sendfile from a memfd (tests/bench/tcp_floor.c measures it,
 * docs/runs).
 *
 * Beyond loopback all of it is encrypted and authenticated, by keys derived from the
 * handshake (tcp_keys.h, tcp_seal.h; docs/security.md, "The data path").
 */
#include "daemon/transport/tcp/tcp.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/socket.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/transport/net_reg.h"
#include "daemon/transport/tcp/tcp_impl.h"

#define TIMEOUT_MIN_NS (5 * LOOP_NS_PER_S)
#define UNSENT_MAX (512 << 10) /* of a stream, in the kernel: others wait behind it */

static void set(int fd, int level, int option, int value)
{
	(void)setsockopt(fd, level, option, &value, sizeof(value)); /* works without */
}

void tcp_socket_tune(const struct tcp_transport *transport, int fd, bool stream)
{
	int seconds = (int)(transport->timeout_ms / 1000);

	set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
	set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, (int)transport->timeout_ms);
	set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
	set(fd, IPPROTO_TCP, TCP_KEEPIDLE, seconds / 2);
	set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
	set(fd, IPPROTO_TCP, TCP_KEEPCNT, seconds / 2);
	if (stream)
		set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_MAX);
}

/* ---- the loop's side ---- */

static void tcp_on_tick(struct loop_timer *timer)
{
	struct tcp_transport *transport = container_of(timer, struct tcp_transport, tick);
	struct tcp_peer *peer;
	struct tcp_xfer *xfer;
	bool wanted = false, beat = transport->ticks++ % TCP_BEAT_TICKS == 0;

	list_foreach(peer, &transport->net.peers, net.link) {
		if (peer->crypto != TCP_CRYPTO_NONE)
			wanted |= !beat || tcp_crypto_beat(peer);
		list_foreach(xfer, &peer->net.xfers, net.link) {
			tcp_xfer_progress(xfer);
			wanted |= xfer->flows;
		}
	}
	net_acceptor_tick(&transport->acceptor, &wanted);
	if (wanted)
		tcp_tick_want(transport);
}

void tcp_tick_want(struct tcp_transport *transport)
{
	if (!loop_timer_running(&transport->tick))
		loop_timer_start(&transport->tick, TCP_TICK_NS);
}

/* ---- open, close ---- */

static int tcp_probe(const struct config *config, uint32_t *caps_p)
{
	(void)config;
	*caps_p = XP_CAP_ALONE;
	return 0;
}

static void tcp_close(struct transport *base)
{
	struct tcp_transport *transport =
		container_of(base, struct tcp_transport, net.base);

	net_acceptor_close(&transport->acceptor);
	tcp_io_close(transport);
	net_fini(&transport->net);
	loop_timer_stop(&transport->tick);
	copy_hand_free(transport->hand);
	mem_free(transport);
}

static void tcp_configure(struct tcp_transport *transport, const struct config *config)
{
	uint64_t timeout_ns = 2 * config->dead_after_ns;

	if (timeout_ns < TIMEOUT_MIN_NS)
		timeout_ns = TIMEOUT_MIN_NS;
	transport->timeout_ms = (unsigned int)(timeout_ns / LOOP_NS_PER_MS);
	transport->acceptor.wait_ns = net_connect_ns(config, TCP_CONNECT_NS);
	transport->stream_count = config->tcp_streams;
	transport->thread_count = config->tcp_threads;
	transport->crypto = (enum tcp_crypto)config->tcp_crypto;
}

static void tcp_describe(struct tcp_transport *transport)
{
	struct tcp_address address;
	char place[64] = "?";

	if (tcp_address_get(transport->net.base.address, transport->net.base.address_len,
			    &address) == 0)
		tcp_sockaddr_text(&address.list[0], place, sizeof(place));
	snprintf(transport->net.base.about, sizeof(transport->net.base.about),
		 "data port %s, up to %u streams a peer, %u threads", place,
		 transport->stream_count, transport->thread_count);
}

static int tcp_open(const struct xp_env *env, const struct xp_callbacks *callbacks,
		    struct transport **transport_p)
{
	struct tcp_transport *transport = mem_zalloc(sizeof(*transport));
	int r;

	if (!transport)
		return err_pass(-ENOMEM);
	net_init(&transport->net, &tcp_net_ops, &tcp_transport, env, callbacks);
	net_acceptor_init(&transport->acceptor, &transport->net);
	loop_timer_init(&transport->tick, env->loop, tcp_on_tick);
	tcp_configure(transport, env->config);
	tcp_probe(env->config, &transport->net.base.caps);
	r = tcp_keys_open();
	if (r == 0)
		r = copy_hand_new(&transport->hand);
	if (r == 0)
		r = tcp_io_open(transport);
	if (r == 0)
		r = tcp_port_open(transport);
	if (r == 0)
		tcp_describe(transport);
	if (r < 0) {
		tcp_close(&transport->net.base);
		return err_pass(r);
	}
	*transport_p = &transport->net.base;
	return 0;
}

const struct transport_ops tcp_transport = {
	.name = "tcp",
	.probe = tcp_probe,
	.open = tcp_open,
	.close = tcp_close,
	.mem_reg = net_mem_reg,
	.mem_dereg = net_mem_dereg,
	.key_pack = net_key_pack,
	.key_unpack = net_key_unpack,
	.key_drop = net_key_drop,
	.peer_open = tcp_peer_open,
	.peer_close = tcp_peer_close,
	.post = net_post,
	.land = net_land,
	.cancel = net_cancel,
	.revoke = net_revoke,
};
