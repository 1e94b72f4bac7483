/* The symbols that TensorRT's Python bindings link against, enough to import them on a machine without TensorRT. */
#include <stddef.h>

void* createInferBuilder_INTERNAL(void* logger, int version) { return NULL; }
void* createInferRefitter_INTERNAL(void* engine, void* logger, int version) { return NULL; }
void* createInferRuntime_INTERNAL(void* logger, int version) { return NULL; }
void* createNvOnnxParserRefitter_INTERNAL(void* refitter, void* logger, int version) { return NULL; }
void* createNvOnnxParser_INTERNAL(void* network, void* logger, int version) { return NULL; }
int getNvOnnxParserVersion(void) { return 0; }
void* getPluginRegistry(void) { return NULL; }
void* getBuilderPluginRegistry(int capability) { return NULL; }
_Bool initLibNvInferPlugins(void* logger, const char* name) { return 1; }
