/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/features.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <stddef.h>
#include <zmq.h>

#include "daemon/modules.h"
#include "daemon/transport/transport.h"
#include "gpu/kernels_image.h"

void features_transports(const char *names[TRANSPORTS_MAX])
{
	size_t i;

	for (i = 0; transport_table[i]; i++) {
		assert(i + 1 < TRANSPORTS_MAX);
		names[i] = transport_table[i]->name;
	}
	names[i] = NULL;
}

void features_print(FILE *out)
{
	const char *names[TRANSPORTS_MAX];
	int major, minor, patch;

	features_transports(names);
	fprintf(out, "kvd %s\nmodules:", KVD_VERSION);
	for (size_t i = 0; modules_built[i]; i++)
		fprintf(out, " %s", modules_built[i]->name);
	zmq_version(&major, &minor, &patch);
	fputs("\ntransports:", out);
	for (size_t i = 0; names[i]; i++)
		fprintf(out, " %s", names[i]);
	fprintf(out, "\nlibzmq: %d.%d.%d, CURVE %s\ncJSON: %s\n", major, minor, patch,
		zmq_has("curve") ? "yes" : "no", cJSON_Version());
	fprintf(out, "GPU kernels: %s\n",
		kernels_image_text() ? kernels_image_text() : "none, built without nvcc");
}
