/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ports are asked of the kernel and given back before etcd takes them; whoever takes one
 * between makes etcd end, and it is started anew with others.
 */
#include "tests/lib/etcd_server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/lib/tmp.h"

static int server_sh(char *out, size_t size, const char *fmt, va_list ap)
{
	char command[4096], dropped[256];
	FILE *pipe;
	size_t len;

	assert_true(vsnprintf(command, sizeof(command), fmt, ap) < (int)sizeof(command));
	pipe = popen(command, "re");
	assert_non_null(pipe);
	len = fread(out ? out : dropped, 1, out ? size - 1 : sizeof(dropped), pipe);
	if (out)
		out[len] = '\0';
	while (fread(dropped, 1, sizeof(dropped), pipe) > 0)
		;
	return pclose(pipe);
}

__attribute__((format(printf, 3, 4))) static int server_run(char *out, size_t size,
							    const char *fmt, ...)
{
	va_list ap;
	int r;

	va_start(ap, fmt);
	r = server_sh(out, size, fmt, ap);
	va_end(ap);
	return r;
}

__attribute__((format(printf, 1, 2))) static int sh(const char *fmt, ...)
{
	va_list ap;
	int r;

	va_start(ap, fmt);
	r = server_sh(NULL, 0, fmt, ap);
	va_end(ap);
	return r;
}

void etcd_server_need(void)
{
	if (sh("command -v etcd >/dev/null && command -v etcdctl >/dev/null") == 0)
		return;
	print_message("needs etcd and etcdctl (etcd-server, etcd-client)\n");
	skip();
}

static void free_port(char port[8])
{
	struct sockaddr_in addr = {.sin_family = AF_INET};
	socklen_t len = sizeof(addr);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	assert_int_equal(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&addr, &len), 0);
	snprintf(port, 8, "%u", ntohs(addr.sin_port));
	close(fd);
}

void etcd_server_init(struct etcd_server *server)
{
	*server = (struct etcd_server){.pid = 0};
	tmp_path(server->dir, sizeof(server->dir), "etcd-XXXXXX");
	assert_non_null(mkdtemp(server->dir));
	free_port(server->port);
	free_port(server->peer_port);
}

static void server_exec(const struct etcd_server *server)
{
	const char *listen = server->listen ? server->listen : "127.0.0.1";
	char data[96], client[128], peer[64], cluster[96], quota[32], log[96];
	char ca[96], cert[96], key[96];
	const char *argv[40];
	int argc = 0, fd;

	snprintf(data, sizeof(data), "%s/data", server->dir);
	snprintf(client, sizeof(client), "http%s://%s:%s", server->tls ? "s" : "", listen,
		 server->port);
	snprintf(peer, sizeof(peer), "http://127.0.0.1:%s", server->peer_port);
	snprintf(cluster, sizeof(cluster), "default=%s", peer);
	snprintf(quota, sizeof(quota), "%ju", (uintmax_t)server->quota);
	snprintf(log, sizeof(log), "%s/log", server->dir);
	snprintf(ca, sizeof(ca), "%s/ca.pem", server->dir);
	snprintf(cert, sizeof(cert), "%s/server.pem", server->dir);
	snprintf(key, sizeof(key), "%s/server.key", server->dir);
	if (server->netns) {
		argv[argc++] = "ip";
		argv[argc++] = "netns";
		argv[argc++] = "exec";
		argv[argc++] = server->netns;
	}
	argv[argc++] = "etcd";
	argv[argc++] = "--data-dir";
	argv[argc++] = data;
	argv[argc++] = "--listen-client-urls";
	argv[argc++] = client;
	argv[argc++] = "--advertise-client-urls";
	argv[argc++] = client;
	argv[argc++] = "--listen-peer-urls";
	argv[argc++] = peer;
	argv[argc++] = "--initial-advertise-peer-urls";
	argv[argc++] = peer;
	argv[argc++] = "--initial-cluster";
	argv[argc++] = cluster;
	argv[argc++] = "--unsafe-no-fsync";
	if (server->quota) {
		argv[argc++] = "--quota-backend-bytes";
		argv[argc++] = quota;
	}
	if (server->tls) {
		argv[argc++] = "--client-cert-auth";
		argv[argc++] = "--trusted-ca-file";
		argv[argc++] = ca;
		argv[argc++] = "--cert-file";
		argv[argc++] = cert;
		argv[argc++] = "--key-file";
		argv[argc++] = key;
	}
	argv[argc] = NULL;
	fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
	dup2(fd, 1);
	dup2(fd, 2);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	execvp(argv[0], (char *const *)argv);
	_exit(127);
}

void etcd_server_launch(struct etcd_server *server)
{
	server->pid = fork();
	assert_true(server->pid >= 0);
	if (server->pid == 0)
		server_exec(server);
}

static int etcd_vctl(const struct etcd_server *server, char *out, size_t size,
		     const char *words)
{
	char tls[256] = "";

	if (server->tls)
		snprintf(tls, sizeof(tls),
			 "--cacert %s/ca.pem --cert %s/client.pem --key "
			 "%s/client.key",
			 server->dir, server->dir, server->dir);
	return server_run(out, size,
			  "ETCDCTL_API=3 %s%s etcdctl --command-timeout=10s "
			  "--dial-timeout=2s --endpoints=http%s://%s:%s %s %s%s %s 2>&1",
			  server->netns ? "ip netns exec " : "",
			  server->netns ? server->netns : "", server->tls ? "s" : "",
			  server->listen ? server->listen : "127.0.0.1", server->port,
			  tls, server->login ? "--user=" : "",
			  server->login ? server->login : "", words);
}

int etcd_ctl(const struct etcd_server *server, char *out, size_t size, const char *fmt,
	     ...)
{
	char words[2048];
	va_list ap;

	va_start(ap, fmt);
	assert_true(vsnprintf(words, sizeof(words), fmt, ap) < (int)sizeof(words));
	va_end(ap);
	return etcd_vctl(server, out, size, words);
}

void etcd_server_ready(struct etcd_server *server)
{
	for (int tries = 0; tries < 30; tries++) {
		int status;

		if (etcd_ctl(server, NULL, 0, "get --consistency=l x") == 0)
			return;
		assert_int_equal(waitpid(server->pid, &status, WNOHANG), 0);
		poll(NULL, 0, 200); /* between two tries */
	}
	sh("tail -c 2000 %s/log >&2", server->dir);
	fail_msg("etcd does not come up");
}

void etcd_server_start(struct etcd_server *server)
{
	etcd_server_launch(server);
	etcd_server_ready(server);
}

void etcd_server_stop(struct etcd_server *server, int signum)
{
	int status;

	if (!server->pid)
		return;
	kill(server->pid, signum);
	assert_int_equal(waitpid(server->pid, &status, 0), server->pid);
	server->pid = 0;
}

void etcd_server_wipe(struct etcd_server *server)
{
	assert_int_equal(sh("rm -rf '%s/data'", server->dir), 0);
}

void etcd_server_free(struct etcd_server *server)
{
	if (server->pid)
		kill(server->pid, SIGCONT);
	etcd_server_stop(server, SIGKILL);
	assert_int_equal(sh("rm -rf '%s'", server->dir), 0);
}

int etcd_net_new(const char *name, const char *here, const char *there)
{
	return sh("exec 2>/dev/null; n=%s here=%s there=%s; ip netns add $n && "
		  "ip link add $n type veth peer name ${n}b netns $n && "
		  "ip addr add $here peer $there dev $n && ip link set $n up && "
		  "ip -n $n link set lo up && "
		  "ip -n $n addr add $there peer $here dev ${n}b && "
		  "ip -n $n link set ${n}b up",
		  name, here, there);
}

int etcd_net_up(const char *name, bool up)
{
	return sh("ip -n %s link set %sb %s", name, name, up ? "up" : "down");
}

void etcd_net_free(const char *name)
{
	sh("ip netns del %s", name);
}

bool etcd_server_certify(struct etcd_server *server)
{
	const char *dir = server->dir;

	server->tls = true;
	if (sh("command -v openssl >/dev/null") != 0)
		return false;
	return sh("cd '%s' && exec 2>/dev/null && "
		  "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=ca -keyout ca.key "
		  "-out ca.pem -days 2 && "
		  "for n in server client; do "
		  "openssl req -newkey rsa:2048 -nodes -subj /CN=$n -keyout $n.key "
		  "-out $n.csr && "
		  "printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\\n"
		  "extendedKeyUsage=serverAuth,clientAuth\\n' > $n.ext && "
		  "openssl x509 -req -in $n.csr -CA ca.pem -CAkey ca.key -CAcreateserial "
		  "-days 2 -extfile $n.ext -out $n.pem || exit 1; done",
		  dir) == 0;
}
