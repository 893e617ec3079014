/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What surrounds a transport in the suite: the loop, helpers, copy threads and
 * a configuration; and the list of backends. Every transport of the daemon's
 * table is there, so one that registers is tested; the fake comes in the
 * variants of its profile that change what its callers see.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/gate/gate.h"
#include "daemon/loop/offload.h"
#include "daemon/memory/copy.h"
#include "tests/sim/fake.h"
#include "daemon/transport/shm/shm_private.h"
#include "daemon/transport/tcp/tcp_wire.h"
#include "gpu/gpu.h"
#include "tests/conform/conform.h"
#include "tests/lib/gates.h"

/* One copy thread and small slices: transfers last longer and are seen in
 * flight; the work is the same. */
#define COPY_THREADS 1u
#define SLICE_BYTES (64u << 10)
/* what is queued on a device is a multiple, and two such stretches can be */
#define SLICE_GPU_BYTES (8u << 10)

static struct config config; /* large, and the same for all ends */

static int config_make(void)
{
	static const char *names[16];
	const struct config_source source = {
		.path = "/dev/null", .name = "conform", .transports = names};
	int r;

	for (size_t i = 0; transport_table[i] && i + 1 < ARRAY_LEN(names); i++)
		names[i] = transport_table[i]->name;
	if (!names[0])
		names[0] = "fake";
	r = config_load(&config, &source);
	if (r < 0)
		return err_pass(r);
	snprintf(config.listen, sizeof(config.listen), "tcp://127.0.0.1:0");
	if (getenv("KVD_CONFORM_RAILS")) /* verbs: which of this machine's ports */
		snprintf(config.verbs_rails, sizeof(config.verbs_rails), "%s",
			 getenv("KVD_CONFORM_RAILS"));
	gpu_fake_path("", config.cuda_library);
	if (getenv("KVD_CONFORM_CRYPTO"))
		config.tcp_crypto = TCP_CRYPTO_AES128GCM;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
	/* an end makes and judges 64 MiB between two turns */
	config.connect_timeout_ns *= 5;
#endif
	config.run_dir[0] = '\0'; /* leave nothing behind */
	config.copy_threads = COPY_THREADS;
	config.slice_bytes = getenv("KVD_CONFORM_GPU") ? SLICE_GPU_BYTES : SLICE_BYTES;
	return 0;
}

#define BOOT_ID_BYTES sizeof((struct xp_env){0}.boot_id)

/* Each byte that a parser of text would stop or split at, everywhere; the one that
 * begins a socket's name, at each place; and others. */
void backend_boot_id(unsigned int n)
{
	static const char *const whole[] = {"00", "0a", "20", "2f", "3a", "40", "ff"};
	char hex[HEX_CHARS(BOOT_ID_BYTES) + 1] = "";
	uint32_t noise = n * 2654435761u;

	for (unsigned int i = 0; i < BOOT_ID_BYTES; i++) {
		noise = noise * 1664525 + 1013904223;
		if (n < ARRAY_LEN(whole))
			memcpy(hex + 2 * i, whole[n], 3);
		else if (i == n - ARRAY_LEN(whole))
			memcpy(hex + 2 * i, "40", 3);
		else
			hex_write(&(uint8_t){(uint8_t)(noise >> 24)}, 1, hex + 2 * i);
	}
	setenv("KVD_CONFORM_BOOT_ID", hex, 1);
}

static void boot_id_take(uint8_t id_p[BOOT_ID_BYTES])
{
	const char *hex = getenv("KVD_CONFORM_BOOT_ID");

	if (hex && !hex_read(hex, id_p, BOOT_ID_BYTES))
		abort();
}

int backend_env_new(const char *name, bool is_virtual, struct xp_env *env_p)
{
	struct xp_env env = {.config = &config, .gpu = is_virtual ? NULL : backend_gpu()};
	int r = config_make();

	(void)name;
	boot_id_take(env.boot_id);
	config.vm_direct = !getenv("KVD_CONFORM_RING");
	if (r == 0)
		r = is_virtual ? loop_new_virtual(1, &env.loop) : loop_new(&env.loop);
	if (r == 0 && !is_virtual)
		gates_begin(env.loop, &env.gates);
	if (r == 0)
		r = is_virtual ? offload_new_inline(env.loop, &env.offload)
			       : offload_new(env.loop, 1, &env.offload);
	if (r == 0 && !is_virtual)
		r = copier_new(env.loop, COPY_THREADS, config.slice_bytes, &env.copier);
	if (r == 0)
		*env_p = env;
	else
		backend_env_free(&env);
	return err_pass(r);
}

void backend_env_free(struct xp_env *env)
{
	if (env->copier)
		copier_free(env->copier);
	if (env->offload)
		offload_free(env->offload);
	gates_free(env->gates);
	loop_free(env->loop);
	*env = (struct xp_env){0};
}

struct gpu *backend_gpu(void)
{
	static struct gpu *gpu;
	char path[256];

	const char *kernels = getenv("KVD_CONFORM_KERNELS"); /* off: copy engines alone */

	if (gpu)
		return gpu;
	if (gpu_new(gpu_fake_path("", path), "auto", &gpu) < 0 ||
	    gpu_tune(gpu, kernels ? kernels : gpu_fake_kernels(), GPU_KERNEL_ROW_BYTES,
		     GPU_STREAMS) < 0)
		abort();
	return gpu;
}

static void tune_plain(struct world *world)
{
	(void)world;
}

static void tune_check(struct world *world)
{
	struct fake_profile *profile = fake_hub_profile(world->hub);

	profile->check = true;
	profile->need_keys = true;
	profile->key_ns = 300000;
}

static void tune_discard(struct world *world)
{
	struct fake_profile *profile = fake_hub_profile(world->hub);

	profile->discard = true;
	profile->reorder = false;
	profile->slice_bytes = 65536;
	profile->slice_ns = 20000;
}

static const struct backend fakes[] = {
	{"fake", "fake", true, tune_plain, NULL, "a socket: the fake has none", false,
	 NULL},
	{"fake-check", "fake", true, tune_check, NULL, "a socket: the fake has none",
	 false, NULL},
	{"fake-discard", "fake", true, tune_discard, NULL, "a socket: the fake has none",
	 false, NULL},
};

/* The address is binary: any byte may be anywhere before the sockets' names. */
static int shm_raw_connect(const void *bytes, size_t len)
{
	struct shm_address address;
	struct sockaddr_un sa;
	socklen_t sa_len;
	int fd;

	if (shm_address_parse(bytes, len, &address) < 0) {
		errno = EINVAL;
		return -1;
	}
	if (shm_sockaddr(address.names[0], &sa, &sa_len) < 0)
		return -1;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&sa, sa_len) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

static int tcp_raw_connect(const void *bytes, size_t len)
{
	struct tcp_address address;
	int fd;

	if (tcp_address_get(bytes, len, &address) < 0) {
		errno = EINVAL;
		return -1;
	}
	fd = socket(address.list[0].any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 &&
	    connect(fd, &address.list[0].any, tcp_sockaddr_len(&address.list[0])) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

/* Of a real backend the suite needs nothing but its name; a row here adds what
 * lets a stranger knock at its door. */
static const struct backend real_hooks[] = {
	{"shm", "shm", false, NULL, shm_raw_connect, NULL, false, NULL},
	{"local", "local", false, NULL, shm_raw_connect, NULL, false, NULL},
	{"tcp", "tcp", false, NULL, tcp_raw_connect, NULL, false, NULL},
	{"ucx", "ucx", false, NULL, NULL, "a raw client: UCX's wire is its own", false,
	 NULL},
};

static struct backend real_make(const struct transport_ops *ops)
{
	for (size_t i = 0; i < ARRAY_LEN(real_hooks); i++) {
		if (strcmp(real_hooks[i].transport, ops->name) == 0)
			return real_hooks[i];
	}
	return (struct backend){.name = ops->name,
				.transport = ops->name,
				.raw_missing = "a raw client for this backend"};
}

/* The same, with memory of GPUs in the place of memfds. */
static struct backend gpu_make(const struct transport_ops *ops, size_t n)
{
	static char names[16][24];
	struct backend backend = real_make(ops);

	snprintf(names[n], sizeof(names[n]), "%s-gpu", ops->name);
	backend.name = names[n];
	backend.gpu = true;
	return backend;
}

const struct backend *backend_at(size_t n)
{
	/* private memory through both daemons' hands, as where neither may read it;
	 * tcp as beyond loopback; main.c sets KVD_CONFORM_RING, _CRYPTO and _GPU for
	 * them, also for the far end */
	static const struct backend ways[] = {
		{.name = "shm-ring", .transport = "shm", .raw_connect = shm_raw_connect},
		{.name = "tcp-aes128gcm",
		 .transport = "tcp",
		 .raw_connect = tcp_raw_connect,
		 .crypto = "aes128gcm"},
	};
	static struct backend reals[2 * 16];
	size_t count = 0;

	if (n < ARRAY_LEN(fakes))
		return &fakes[n];
	n -= ARRAY_LEN(fakes);
	if (n < ARRAY_LEN(ways))
		return &ways[n];
	n -= ARRAY_LEN(ways);
	while (transport_table[count])
		count++;
	if (n >= 2 * count)
		return NULL;
	assert(n < ARRAY_LEN(reals));
	reals[n] = n < count ? real_make(transport_table[n])
			     : gpu_make(transport_table[n - count], n - count);
	return &reals[n];
}

const struct transport_ops *backend_ops(const struct backend *backend)
{
	return strcmp(backend->transport, "fake") == 0
		       ? &fake_ops
		       : transport_find(backend->transport);
}
